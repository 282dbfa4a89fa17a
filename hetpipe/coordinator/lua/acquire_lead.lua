-- Gives the lead to a candidate if nobody has it; the leader itself has its lease renewed. Gives candidate, name and
-- fence of who has it now.
-- KEYS[1] {hetpipe}:leader       hash, candidate, name, fence
-- KEYS[2] {hetpipe}:fence        counter
-- ARGV[1] candidate  ARGV[2] its name  ARGV[3] lower bound of the fence  ARGV[4] lease in milliseconds
local holder = redis.call('HGET', KEYS[1], 'candidate')
if not holder then
  holder = ARGV[1]
  local fence = math.max(tonumber(redis.call('GET', KEYS[2]) or '0'), tonumber(ARGV[3])) + 1
  redis.call('SET', KEYS[2], string.format('%d', fence))
  redis.call('HSET', KEYS[1], 'candidate', holder, 'name', ARGV[2], 'fence', string.format('%d', fence))
end
if holder == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
return redis.call('HMGET', KEYS[1], 'candidate', 'name', 'fence')
