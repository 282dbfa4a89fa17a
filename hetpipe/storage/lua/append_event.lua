-- Appends an event under its number; no effect if its number is not above the last one. Returns 1, or 0 if the job does not
-- exist.
-- KEYS[1] {hetpipe}:job:ID       hash, version, record
-- KEYS[2] {hetpipe}:events:ID    stream, SEQUENCE-0 -> event
-- ARGV[1] sequence number  ARGV[2] event as JSON  ARGV[3] events to keep
if redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
local last = 0
if newest[1] then
  last = tonumber(string.match(newest[1][1], '^%d+'))
end
local sequence = tonumber(ARGV[1])
if sequence > last then
  redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[3], ARGV[1] .. '-0', 'event', ARGV[2])
  local left = redis.call('PTTL', KEYS[1])
  if left > 0 then
    redis.call('PEXPIRE', KEYS[2], left)
  end
end
return 1
