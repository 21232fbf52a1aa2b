# "$nr_limit SECONDS COMMAND..." runs a command, and ends it with all of its processes after these
# seconds. Busybox's timeout ends only its child and leaves the child's children: nr_session ends the
# whole session instead. Otherwise $nr_limit is a program and no function, which saves a shell.
nr_timeout=
IFS=:
for nr_dir in $PATH; do
    case $nr_dir in *[!A-Za-z0-9/._+-]*) continue ;; esac
    if [ -x "$nr_dir/timeout" ]; then nr_timeout=$nr_dir/timeout; break; fi
done
unset IFS
nr_limit="$nr_timeout -k 1"
if [ -z "$nr_timeout" ] || [ "$nr_timeout" -ef /bin/busybox ]; then
    nr_limit=nr_session
fi
nr_session() {
    nr_seconds=$1
    shift
    # Without a redirection, a background process has no standard input.
    { setsid "$@" <&6 & } 6<&0
    nr_pid=$!
    (sleep "$nr_seconds"; kill -s TERM -- -$nr_pid; sleep 1; kill -s KILL -- -$nr_pid) \
        >/dev/null 2>&1 3>&- 4>&- 5>&- &
    nr_watch=$!
    wait $nr_pid
    nr_status=$?
    kill $nr_watch
    return $nr_status
}
