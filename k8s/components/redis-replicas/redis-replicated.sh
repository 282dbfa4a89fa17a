# Starts Redis with the settings in $1, as the primary or as a replica of it. Which pod is the primary is said by the manifests
# alone, in PRIMARY and in the selector of the Service `redis`: a restarted pod never has a role of its own.
[ "$POD_NAME" = "$PRIMARY" ] || set -- "$@" --replicaof redis 6379
exec redis-server "$@" --include /etc/redis/redis-replicas.conf
