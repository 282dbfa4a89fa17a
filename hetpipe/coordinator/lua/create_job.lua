-- Keeps a new job at version 1, unless there is one with its id. Gives the record that is kept.
-- KEYS[1] {hetpipe}:jobs         sorted set, job id -> order of creation
-- KEYS[2] {hetpipe}:job:ID       hash, version, record
-- KEYS[3] {hetpipe}:job_orders   counter
-- ARGV[1] job id  ARGV[2] record as JSON
if redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('HSET', KEYS[2], 'version', 1, 'record', ARGV[2])
  redis.call('ZADD', KEYS[1], redis.call('INCR', KEYS[3]), ARGV[1])
end
return redis.call('HGET', KEYS[2], 'record')
