-- Stands before every script of a store that writes as the leader; refuses it once another one leads. Takes its key and
-- its argument away, so that the script finds its own.
-- KEYS[last] {hetpipe}:fence     counter
-- ARGV[last] fence of the writer
if redis.call('GET', table.remove(KEYS)) ~= table.remove(ARGV) then
  return redis.error_reply('NOTLEADER another coordinator leads')
end
