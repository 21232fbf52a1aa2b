# The checks of a site's own. Each runs in its own shell under its own limit; a check that cannot be
# ended (state D) or whose output stays open costs only itself: it is left behind with a pipe without
# a reader. Answers are lines of at most 80 bytes, which the kernel writes whole: "NUMBER o BASE64" of
# the output, "NUMBER e BASE64" of the messages, "NUMBER r STATUS".
# shellcheck disable=SC2016 # the inner shell's variables
nr_eval='nr_text=$NR_TEXT; unset NR_TEXT; eval "$nr_text"'
# shellcheck disable=SC2016 # as above
nr_relay='while read -r nr_line; do printf "%s %s\n" "$0" "$nr_line"; done'
nr_newline='
'

# nr_site NUMBER SECONDS TEXT. A command that ignores SIGTERM is killed 1 s after its limit; a busy
# node needs some seconds more to report that.
nr_site() {
    { nr_site_check "$2" "$3" & } | $nr_limit $(($2 + 5)) sh -c "$nr_relay" "$1"
}

# The first bytes of the output, and of the messages; the rest is read, so that a command that prints
# much does not end early by it.
nr_site_check() {
    exec 3>&1 2>/dev/null </dev/null
    nr_ended=$({ { { nr_site_run "$1" "$2" 2>&4 3>&- 4>&- 5>&-; printf 'r %s\n' "$?" >&5; } |
        nr_site_pack o 16385 >&3; } 4>&1 | nr_site_pack e 300; } 5>&1)
    printf '%s\n' "$nr_ended"
}
nr_site_pack() {
    { head -c "$2"; cat >/dev/null; } | base64 | sed "s/^/$1 /"
}

# `timeout`, or the session's first process, leads a process group: what the command leaves behind
# there is ended with it.
nr_site_run() {
    NR_TEXT=$2
    export NR_TEXT
    if [ "$nr_limit" = nr_session ]; then
        nr_session "$1" sh -c "$nr_eval"
    else
        $nr_limit "$1" sh -c "$nr_eval" &
        nr_pid=$!
        wait $nr_pid
    fi
    nr_status=$?
    kill -s KILL -- "-$nr_pid" 2>/dev/null
    return $nr_status
}
