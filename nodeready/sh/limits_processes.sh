# The processes of the services @NAMES@, without systemd's cgroups. An ordinary user's process (UID_MIN is
# 1000) may have the name of a service and lower limits.
nr_find limits '/proc/*/comm:*'
for nr_row in $nr_found; do
    nr_pid=${nr_row%%/comm:*}
    nr_pid=${nr_pid#/proc/}
    nr_comm=${nr_row#*:1:}
    case $nr_comm in @NAMES@) ;; *) continue ;; esac
    nr_status Uid "/proc/$nr_pid"; [ "${nr_field:-0}" -ge 1000 ] && continue
    printf 'process=%s %s\n' "$nr_comm" "$nr_pid"
    set -- "$@" "/proc/$nr_pid/limits"
done
