-- Sets the expiry of the events of a job without a record, so that a restored record still has them. Returns 1.
-- KEYS[1] {hetpipe}:job:ID       hash, version, record
-- KEYS[2] {hetpipe}:events:ID    stream
-- ARGV[1] milliseconds
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('PEXPIRE', KEYS[2], ARGV[1])
end
return 1
