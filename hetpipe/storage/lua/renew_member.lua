-- Renews the lease of a member under this registration. Returns 1, or 0 if there is none.
-- KEYS[1] {hetpipe}:member:ID    hash, registration, order, info
-- ARGV[1] registration  ARGV[2] lease in milliseconds
if redis.call('HGET', KEYS[1], 'registration') ~= ARGV[1] then
  return 0
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
