-- Releases a lead; no effect if another candidate has it.
-- KEYS[1] {hetpipe}:leader       hash, candidate, name, fence
-- ARGV[1] candidate  ARGV[2] its fence
local holder = redis.call('HMGET', KEYS[1], 'candidate', 'fence')
if holder[1] == ARGV[1] and holder[2] == ARGV[2] then
  redis.call('DEL', KEYS[1])
end
return 1
