-- Gives a term above every one before and above a lower bound.
-- KEYS[1] {hetpipe}:term         counter
-- ARGV[1] lower bound
local term = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), tonumber(ARGV[1])) + 1
redis.call('SET', KEYS[1], string.format('%d', term))
return term
