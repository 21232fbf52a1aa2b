# nr_end TAG: end what runs with this tag, with all that it started; TAG may be "[n]ame", so that
# the search does not find itself. GNU timeout makes a process group, busybox's does not: there it
# is the group of the login. A package manager at work finishes: half-way it would leave a node on
# which nothing can be installed.
nr_end() {
    nr_me=$(id -u)
    grep -lase "$1" /proc/[0-9]*/cmdline | while IFS= read -r nr_file; do
        { IFS= read -r nr_stat <"${nr_file%cmdline}stat"; } 2>/dev/null || continue
        # The command name may contain anything; the fields after its last parenthesis do not.
        # shellcheck disable=SC2086 # numbers
        set -- ${nr_stat##*) }
        if [ "$3" -le 1 ]; then continue; fi 2>/dev/null
        # Everybody can read the tag and give it to a process: not one of somebody else's, whose
        # group may be that of a service.
        nr_who=
        {
            while read -r nr_key nr_who nr_x; do
                if [ "$nr_key" = Uid: ]; then break; fi
            done <"${nr_file%cmdline}status"
        } 2>/dev/null
        if [ "$nr_who" != "$nr_me" ]; then continue; fi
        grep -qsE "^[0-9]+ \((apt-get|dpkg|dnf|yum|rpm|zypper)\) . [0-9]+ $3 " /proc/[0-9]*/stat ||
            kill -s TERM -- "-$3" 2>/dev/null
    done
}
