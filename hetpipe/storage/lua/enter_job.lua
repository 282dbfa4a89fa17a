-- Adds a job to its index, unless it is in it. Returns 1.
-- KEYS[1] {hetpipe}:jobs         sorted set, job id -> order of creation
-- KEYS[2] {hetpipe}:job_orders   counter
-- ARGV[1] job id
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  redis.call('ZADD', KEYS[1], redis.call('INCR', KEYS[2]), ARGV[1])
end
return 1
