-- Registers a member, or replaces the registration of a live one, which keeps its order. Returns its order.
-- KEYS[1] {hetpipe}:members      sorted set, member id -> order
-- KEYS[2] {hetpipe}:member:ID    hash, registration, order, info
-- KEYS[3] {hetpipe}:orders       counter
-- ARGV[1] member id  ARGV[2] registration  ARGV[3] info as JSON  ARGV[4] lease in milliseconds
local order = redis.call('HGET', KEYS[2], 'order')
if not order then
  order = redis.call('INCR', KEYS[3])
end
redis.call('HSET', KEYS[2], 'registration', ARGV[2], 'order', order, 'info', ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
redis.call('ZADD', KEYS[1], order, ARGV[1])
return tonumber(order)
