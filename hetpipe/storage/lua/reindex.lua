-- Adds records to their index, or moves them within it. Returns 1.
-- KEYS[1] {hetpipe}:members or {hetpipe}:jobs            sorted set, id -> order
-- KEYS[2] {hetpipe}:orders or {hetpipe}:job_orders       counter
-- ARGV[1], ARGV[2], ARGV[3], ARGV[4], …  order, id, order, id, …
local highest = tonumber(redis.call('GET', KEYS[2]) or '0') or 0
for place = 1, #ARGV, 2 do
  redis.call('ZADD', KEYS[1], ARGV[place], ARGV[place + 1])
  highest = math.max(highest, tonumber(ARGV[place]))
end
redis.call('SET', KEYS[2], string.format('%d', highest))
return 1
