-- Ends a membership under this registration; no effect if there is none.
-- KEYS[1] {hetpipe}:members      sorted set, member id -> order
-- KEYS[2] {hetpipe}:member:ID    hash, registration, order, info
-- ARGV[1] member id  ARGV[2] registration
if redis.call('HGET', KEYS[2], 'registration') == ARGV[2] then
  redis.call('DEL', KEYS[2])
  redis.call('ZREM', KEYS[1], ARGV[1])
end
return 1
