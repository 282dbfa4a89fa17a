-- Keeps a new job at version 1, unless there is one with its id. Gives the record that is kept. One write, so that it is
-- no transaction in the append-only file: whatever a server does with those, the record is there after its restart.
-- KEYS[1] {hetpipe}:job:ID       hash, version, record
-- ARGV[1] record as JSON
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], 'version', 1, 'record', ARGV[1])
end
return redis.call('HGET', KEYS[1], 'record')
