-- Renews the lease of a lead, even one that expired or was lost with the server's memory, unless another one has led
-- since. Returns '', or the name of that leader.
-- KEYS[1] {hetpipe}:leader       hash, candidate, name, fence
-- KEYS[2] {hetpipe}:fence        counter
-- ARGV[1] candidate  ARGV[2] its name  ARGV[3] its fence  ARGV[4] lease in milliseconds
local holder = redis.call('HMGET', KEYS[1], 'candidate', 'name')
if holder[1] and holder[1] ~= ARGV[1] then
  return holder[2]
end
if (redis.call('GET', KEYS[2]) or ARGV[3]) ~= ARGV[3] then
  return 'another coordinator'
end
redis.call('SET', KEYS[2], ARGV[3])
redis.call('HSET', KEYS[1], 'candidate', ARGV[1], 'name', ARGV[2], 'fence', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return ''
