-- Renews the lease of a lead, even one that expired or was lost with the server's memory or in a failover, unless another
-- one has led since. An older lead, or an older counter, is what a failover has brought back. Returns '', or the name of
-- the other leader.
-- KEYS[1] {hetpipe}:leader       hash, candidate, name, fence
-- KEYS[2] {hetpipe}:fence        counter
-- ARGV[1] candidate  ARGV[2] its name  ARGV[3] its fence  ARGV[4] lease in milliseconds
local own = tonumber(ARGV[3])
local holder = redis.call('HMGET', KEYS[1], 'candidate', 'name', 'fence')
if holder[1] and holder[1] ~= ARGV[1] and (tonumber(holder[3]) or own) >= own then
  return holder[2]
end
if (tonumber(redis.call('GET', KEYS[2]) or ARGV[3]) or own + 1) > own then
  return 'another coordinator'
end
redis.call('SET', KEYS[2], ARGV[3])
redis.call('HSET', KEYS[1], 'candidate', ARGV[1], 'name', ARGV[2], 'fence', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return ''
