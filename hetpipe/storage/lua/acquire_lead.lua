-- Grants the lead to a candidate if it is free; renews the lease of the leader itself. Returns candidate, name and fence
-- of the current leader; an error that begins with EXHAUSTED when the next fence would reach the limit.
-- KEYS[1] {hetpipe}:leader       hash, candidate, name, fence
-- KEYS[2] {hetpipe}:fence        counter
-- ARGV[1] candidate  ARGV[2] its name  ARGV[3] lower bound of the fence  ARGV[4] lease in milliseconds
-- ARGV[5] limit of fences
local holder = redis.call('HGET', KEYS[1], 'candidate')
if not holder then
  holder = ARGV[1]
  local limit = tonumber(ARGV[5])
  local fence = math.max(tonumber(redis.call('GET', KEYS[2]) or '0') or limit, tonumber(ARGV[3])) + 1
  if fence >= limit then
    return redis.error_reply('EXHAUSTED no fence is left')
  end
  redis.call('SET', KEYS[2], string.format('%d', fence))
  redis.call('HSET', KEYS[1], 'candidate', holder, 'name', ARGV[2], 'fence', string.format('%d', fence))
end
if holder == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
return redis.call('HMGET', KEYS[1], 'candidate', 'name', 'fence')
