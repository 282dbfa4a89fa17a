-- Allocates a term above all earlier ones and above a lower bound; an error that begins with EXHAUSTED if it would reach
-- the limit.
-- KEYS[1] {hetpipe}:term         counter
-- ARGV[1] lower bound  ARGV[2] limit of terms
local limit = tonumber(ARGV[2])
local term = math.max(tonumber(redis.call('GET', KEYS[1]) or '0') or limit, tonumber(ARGV[1])) + 1
if term >= limit then
  return redis.error_reply('EXHAUSTED no term is left')
end
redis.call('SET', KEYS[1], string.format('%d', term))
return term
