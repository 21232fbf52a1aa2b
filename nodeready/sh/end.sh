# nr_end TAG: end the processes with this tag and their children; TAG may be "[n]ame", so that the
# search does not find itself. GNU timeout makes a process group. With busybox's timeout, the group
# is that of the login. A package manager may finish: after an interruption no package could be
# installed on the node.
nr_end() {
    nr_me=$(id -u)
    grep -lase "$1" /proc/[0-9]*/cmdline | while IFS= read -r nr_file; do
        { IFS= read -r nr_stat <"${nr_file%cmdline}stat"; } 2>/dev/null || continue
        # The command name may contain anything; the fields after its last parenthesis do not.
        # shellcheck disable=SC2086 # numbers
        set -- ${nr_stat##*) }
        if [ "$3" -le 1 ]; then continue; fi 2>/dev/null
        # Any user can read the tag and start a process with it. So another user's process stays: its
        # group may be that of a service.
        nr_uid=
        {
            while read -r nr_key nr_uid nr_x; do
                if [ "$nr_key" = Uid: ]; then break; fi
            done <"${nr_file%cmdline}status"
        } 2>/dev/null
        if [ "$nr_uid" != "$nr_me" ]; then continue; fi
        grep -qsE "^[0-9]+ \((apt-get|dpkg|dnf|yum|rpm|zypper)\) . [0-9]+ $3 " /proc/[0-9]*/stat ||
            kill -s TERM -- "-$3" 2>/dev/null
    done
}
