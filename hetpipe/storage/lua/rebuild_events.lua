-- Replaces the events of a job, which keep their time to live. Returns 1.
-- KEYS[1] {hetpipe}:events:ID    stream, SEQUENCE-0 -> event
-- ARGV[1], ARGV[2], ARGV[3], ARGV[4], …  sequence number, event as JSON, sequence number, event as JSON, …
local left = redis.call('PTTL', KEYS[1])
redis.call('DEL', KEYS[1])
for place = 1, #ARGV, 2 do
  redis.call('XADD', KEYS[1], ARGV[place] .. '-0', 'event', ARGV[place + 1])
end
if left >= 0 then
  redis.call('PEXPIRE', KEYS[1], left)
end
return 1
