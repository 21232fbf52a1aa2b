# The unit file of a service, its drop-ins, and its processes by their cgroup. An ordinary user's process
# (UID_MIN is 1000) may have the name of a service and lower limits.
# shellcheck disable=SC2043 # @FILES@ are several
for nr_file in @FILES@; do
    if [ -e "$nr_file" ] || [ -L "$nr_file" ]; then
        # A link to /dev/null masks the unit: no regular file.
        if [ -f "$nr_file" ]; then
            printf 'unit=%s %s\n' @NAME@ "$nr_file"
            set -- "$@" "$nr_file" @DROPINS@
            nr_there there @DROPINS@
        fi
        break
    fi
done
nr_first='' nr_main='' nr_persons=''
for nr_file in @PROCS@; do
    if [ ! -r "$nr_file" ]; then continue; fi
    while read -r nr_pid; do
        nr_comm=
        { read -r nr_comm <"/proc/$nr_pid/comm"; } 2>/dev/null || continue
        # Without cgroups for jobs, the processes of jobs are in slurmd's cgroup.
        if nr_status Uid "/proc/$nr_pid"; [ "${nr_field:-0}" -ge 1000 ]; then
            if [ -n "$nr_first" ] && [ -z "$nr_persons" ]; then continue; fi
            nr_persons=1
        fi
        nr_first=${nr_first:-$nr_pid}
        if [ "$nr_comm" = @COMMAND@ ]; then nr_main="$nr_main $nr_pid"; fi
    done <"$nr_file"
done
for nr_pid in ${nr_main:-$nr_first}; do
    printf 'process=%s %s\n' @NAME@ "$nr_pid"
    set -- "$@" "/proc/$nr_pid/limits"
done
