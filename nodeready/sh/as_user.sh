# Change a file in a user's home directory with that user's rights: a link there then leads nowhere
# that the user could not write anyway. The process that does it is the user's, who may stop it,
# trace it and take its descriptors. So it has none of ours but a pipe of its own, no environment of
# ours and a session of its own, and what it says is read for a limited time and up to a limited
# size.

# nr_as USER COMMAND: run a line of our library with this user's rights; $NR_HOME in it is the home
# directory that the node's user database names. A user for whom that fails does not stop the
# others: nr_as_done tells in the end.
nr_unwritten=
nr_as() {
    nr_why=$(nr_try_as "$1" "$2")
    if [ -n "$nr_why" ]; then
        nr_unwritten="$nr_unwritten; $1: $nr_why"
    fi
}

# nr_as_done: fail when that was not done for all users.
nr_as_done() {
    if [ -n "$nr_unwritten" ]; then nr_fail "${nr_unwritten#; }"; fi
}

# nr_try_as USER COMMAND: prints why it was not done, or nothing.
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
    # In the environment, which is that user's alone; arguments can be read by everybody.
    NR_TEXT="$NR_LIB$2
echo nr_done"
    nr_said=$({
        nr_become "$1" </dev/null 2>&1 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&- &
    } | timeout -k 1 11 head -c 4096)
    case $nr_said in
    *nr_done) ;;
    *'nodeready: '*)
        nr_said=${nr_said#*nodeready: }
        printf '%s' "${nr_said%%
*}"
        ;;
    *) printf 'no answer in 10 s' ;;
    esac
}

# nr_become USER: become that user in a process without an environment of ours, and do NR_TEXT.
nr_become() {
    nr_user=$1
    # Without a name that the shell keeps for itself (UID of bash).
    for nr_name in $(env | sed -n 's/^\([A-Za-z_][A-Za-z0-9_]*\)=.*/\1/p'); do
        case $nr_name in
        PATH | LC_ALL) ;;
        *) command unset "$nr_name" 2>/dev/null ;;
        esac
    done
    export NR_TEXT NR_HOME
    # shellcheck disable=SC2016 # the other shell's variable
    set -- 'eval "$NR_TEXT"'
    nr_setpriv=$(command -v setpriv)
    # Busybox has one that changes no user.
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
