-- Sets fence and term while there is no leader. Returns '', or the name of the leader; then nothing has changed.
-- KEYS[1] {hetpipe}:leader       hash, candidate, name, fence
-- KEYS[2] {hetpipe}:fence        counter
-- KEYS[3] {hetpipe}:term         counter
-- ARGV[1] fence, or '' to leave it  ARGV[2] term, or '' to leave it
local holder = redis.call('HGET', KEYS[1], 'name')
if holder then
  return holder
end
for place, value in ipairs(ARGV) do
  if value ~= '' then
    redis.call('SET', KEYS[place + 1], value)
  end
end
return ''
