# The ~/.pdshrc of the users @NAMES@.
#
# It is read with the user's rights: a link in a home directory then shows nothing that the user
# could not read, and a home on NFS that is closed to root can be read. The reading process is the
# user's: the user may stop it, trace it, take its descriptors and write anything (ptrace(2)). The
# file may be a FIFO, on the user's file system (fuse(4)) or under a lease (fcntl(2)). So the
# process has no descriptor but a separate pipe, an empty environment and a separate session.
# root's `base64` reads the pipe for a limited time, and root's `head` takes a limited size of it.
# All users are asked at once and nothing waits for their processes: no user delays another.
# shellcheck disable=SC2016,SC2086 # a variable of the inner shell; a command's words
nr_text=@AS_USER@
if command -v getent >/dev/null 2>&1; then nr_passwd=$(getent passwd @NAMES@)
else nr_passwd=$(cat /etc/passwd); fi
# PAM is not asked: its modules read files of the user's.
nr_find_setpriv
nr_look() {
    nr_user=$1
    set -- sh -c "$nr_text" sh "$nr_home" @READ_BYTES@
    if [ "$nr_me" != 0 ]; then :
    elif [ -n "$nr_setpriv" ]; then
        set -- setpriv --reuid="$nr_uid" --regid="$nr_gid" --init-groups -- "$@"
    elif command -v runuser >/dev/null 2>&1; then set -- runuser -u "$nr_user" -- "$@"
    else set -- su -s /bin/sh "$nr_user" -c "$nr_text" sh "$nr_home" @READ_BYTES@; fi
    exec setsid timeout -s KILL @ANSWER_S@ env -i PATH="$PATH" LC_ALL=C "$@"
}
nr_rest() {
    shift
    nr_users "$@"
}
nr_users() {
    if [ $# = 0 ]; then return; fi
    nr_home=
    while IFS=: read -r nr_name nr_x nr_uid nr_gid nr_gecos nr_home nr_shell; do
        if [ "$nr_name" = "$1" ]; then break; fi
        nr_home=
    done <<NODEREADY
$nr_passwd
NODEREADY
    case $nr_uid:$nr_gid in *[!0-9:]* | :* | *:) nr_home= ;; esac
    if [ -z "$nr_home" ]; then
        nr_rest "$@"
        return
    fi
    printf 'uid=%s %s\nuser=%s %s\n' "$1" "$nr_uid" "$1" "$nr_home"
    {
        nr_look "$1" </dev/null 2>/dev/null 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&- &
    } | timeout -k 1 @LATEST_S@ base64 | {
        nr_rest "$@" </dev/null
        printf '\nread=%s\n' "$1"
        exec head -c @PRINTED_BYTES@
    }
}
nr_users @NAMES@
:
