-- Removes an entry of an index whose record has expired.
-- KEYS[1] {hetpipe}:members or {hetpipe}:jobs         sorted set, id -> order
-- KEYS[2] {hetpipe}:member:ID or {hetpipe}:job:ID     the record
-- ARGV[1] id
if redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('ZREM', KEYS[1], ARGV[1])
end
return 1
