-- Creates a job at version 1, unless its id exists. Returns the stored record. A single write, so it is no transaction in
-- the append-only file and is recovered whatever a server does with incomplete ones.
-- KEYS[1] {hetpipe}:job:ID       hash, version, record
-- ARGV[1] record as JSON
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], 'version', 1, 'record', ARGV[1])
end
return redis.call('HGET', KEYS[1], 'record')
