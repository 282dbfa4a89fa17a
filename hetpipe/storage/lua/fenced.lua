-- Prefix of every script that writes as the leader: fails once another coordinator leads. Removes its own key and
-- argument, so that the script finds its own.
-- KEYS[last] {hetpipe}:fence     counter
-- ARGV[last] fence of the writer
if redis.call('GET', table.remove(KEYS)) ~= table.remove(ARGV) then
  return redis.error_reply('NOTLEADER another coordinator leads')
end
