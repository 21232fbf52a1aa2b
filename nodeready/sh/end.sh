# nr_end TAG: end what runs with this tag, with all that it started; TAG may be "[n]ame", so that
# the search does not find itself. GNU timeout makes a process group, busybox's does not: there it
# is the group of the login. What a group ignores (a package manager at work) ends by itself.
nr_end() {
    grep -lase "$1" /proc/[0-9]*/cmdline | while IFS= read -r nr_file; do
        { IFS= read -r nr_stat <"${nr_file%cmdline}stat"; } 2>/dev/null || continue
        # The command name may contain anything; the fields after its last parenthesis do not.
        # shellcheck disable=SC2086 # numbers
        set -- ${nr_stat##*) }
        if [ "$3" -gt 1 ]; then kill -s TERM -- "-$3"; fi 2>/dev/null
    done
}
