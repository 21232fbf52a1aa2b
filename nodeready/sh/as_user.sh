# Change a file in a user's home directory with that user's rights: then a link there cannot lead to
# a file that the user may not write. The process belongs to the user, who can stop it, trace it and
# use its descriptors. So the process has only a separate pipe, a clean environment and a separate
# session, and its output is read with a limit of time and size.

# nr_as USER COMMAND: run a line of this library with the user's rights; $NR_HOME is the home
# directory in the node's user database. A failure for one user does not stop the run;
# nr_as_done reports it at the end.
nr_unwritten=
nr_as() {
    nr_reason_text=$(nr_try_as "$1" "$2")
    if [ -n "$nr_reason_text" ]; then
        nr_unwritten="$nr_unwritten; $1: $nr_reason_text"
    fi
}

# nr_as_done: fail where nr_as failed for a user.
nr_as_done() {
    if [ -n "$nr_unwritten" ]; then nr_fail "${nr_unwritten#; }"; fi
}

# nr_try_as USER COMMAND: print why it failed, or nothing.
nr_try_as() {
    if command -v getent >/dev/null 2>&1; then nr_line=$(getent passwd -- "$1")
    else nr_line=$(grep -m 1 -- "^$1:" /etc/passwd); fi
    IFS=: read -r nr_x nr_x nr_uid nr_gid nr_x NR_HOME nr_x <<NODEREADY
$nr_line
NODEREADY
    case $nr_uid:$nr_gid in *[!0-9:]* | :* | *:) nr_uid= ;; esac
    case $NR_HOME in /*) ;; *) nr_uid= ;; esac
    if [ -z "$nr_uid" ]; then
        printf 'is no user of the node'
        return
    fi
    # In the environment, which only that user can read; all users can read arguments.
    NR_TEXT="$NR_LIB$2
echo nr_done"
    nr_output=$({
        nr_become "$1" </dev/null 2>&1 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&- &
    } | timeout -k 1 11 head -c 4096)
    case $nr_output in
    *nr_done) ;;
    *'nodeready: '*)
        nr_output=${nr_output#*nodeready: }
        printf '%s' "${nr_output%%
*}"
        ;;
    *) printf 'no answer in 10 s' ;;
    esac
}

# nr_become USER: become that user in a process with a clean environment, and run NR_TEXT.
nr_become() {
    nr_user=$1
    # Errors are ignored: the shell refuses to unset its own variables (UID of bash).
    for nr_name in $(env | sed -n 's/^\([A-Za-z_][A-Za-z0-9_]*\)=.*/\1/p'); do
        case $nr_name in
        PATH | LC_ALL) ;;
        *) command unset "$nr_name" 2>/dev/null ;;
        esac
    done
    export NR_TEXT NR_HOME
    # shellcheck disable=SC2016 # a variable of the inner shell
    set -- 'eval "$NR_TEXT"'
    nr_setpriv=$(command -v setpriv)
    # Busybox's setpriv cannot change the user.
    if [ "$nr_setpriv" -ef /bin/busybox ]; then nr_setpriv=; fi
    if [ -n "$nr_setpriv" ]; then
        set -- setpriv --reuid="$nr_uid" --regid="$nr_gid" --init-groups -- sh -c "$1"
    elif command -v runuser >/dev/null 2>&1; then
        set -- runuser -u "$nr_user" -- sh -c "$1"
    else
        set -- su -s /bin/sh "$nr_user" -c "$1"
    fi
    exec setsid timeout -s KILL 10 "$@"
}
