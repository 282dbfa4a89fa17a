-- Replaces one version of a job by the next. Returns 1, or 0 if the job has another version or does not exist. Repeating the
-- same replacement returns 1 again.
-- KEYS[1] {hetpipe}:job:ID       hash, version, record
-- KEYS[2] {hetpipe}:events:ID    stream
-- ARGV[1] version to replace  ARGV[2] record of the next version as JSON  ARGV[3] milliseconds to keep both, or -1
local version = redis.call('HGET', KEYS[1], 'version')
if not version then
  return 0
end
local following = tostring(tonumber(ARGV[1]) + 1)
local repeated = version == following and redis.call('HGET', KEYS[1], 'record') == ARGV[2]
if version ~= ARGV[1] and not repeated then
  return 0
end
redis.call('HSET', KEYS[1], 'version', following, 'record', ARGV[2])
for _, key in ipairs(KEYS) do
  if ARGV[3] == '-1' then
    redis.call('PERSIST', key)
  else
    redis.call('PEXPIRE', key, ARGV[3])
  end
end
return 1
