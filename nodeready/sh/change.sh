# All changes of a node go through these functions. Every change begins with this file; runs as root.

# nr_fail TEXT: print one line on standard error, and exit. No file stays half-written.
nr_fail() {
    printf 'nodeready: %s\n' "$*" >&2
    exit 1
}

# nr_reason PATH TEXT: a tool's error in plain words, with the path of a full or read-only file system.
nr_reason() {
    case $2 in
    *'No space left'*) printf 'no space left on %s' "$1" ;;
    *'Read-only file system'*) printf 'read-only file system: %s' "$1" ;;
    *'quota exceeded'*) printf 'disk quota exceeded: %s' "$1" ;;
    *) printf '%s: %s' "$1" "${2##*: }" ;;
    esac
}

nr_me='' nr_group=''
nr_tmp='' nr_locked=''
nr_cleanup() {
    if [ -n "$nr_tmp" ]; then rm -f -- "$nr_tmp"; fi
    nr_tmp=
}
trap nr_cleanup EXIT
trap 'exit 143' TERM HUP INT

# nr_start PID: the start time of a process, so that a recycled pid is not taken for it.
nr_start() {
    nr_stat=
    { IFS= read -r nr_stat <"/proc/$1/stat"; } 2>/dev/null || return 1
    # The command name may contain anything; the fields after its last parenthesis do not.
    # shellcheck disable=SC2086 # numbers
    set -- ${nr_stat##*) }
    printf '%s' "${20}"
}

# nr_lives PID START: this process, with this start time, still runs.
nr_lives() { [ "${1:-0}" -gt 0 ] 2>/dev/null && [ "$(nr_start "$1")" = "$2" ]; }

# nr_anchor: the nearest ancestor that is no shell: the connection's sshd, or the local program. It
# ends with the connection, and the lock becomes free.
nr_anchor() {
    nr_pid=$PPID
    while [ "$nr_pid" -gt 1 ]; do
        { IFS= read -r nr_stat <"/proc/$nr_pid/stat"; } 2>/dev/null || break
        nr_comm=${nr_stat#*(}
        nr_comm=${nr_comm%)*}
        case $nr_comm in
        sh | dash | bash | ash | busybox | ksh | mksh | zsh | fish | csh | tcsh) ;;
        sudo | su | runuser | timeout | base64 | dzdo) ;;
        *)
            printf '%s' "$nr_pid"
            return
            ;;
        esac
        # shellcheck disable=SC2086 # numbers
        set -- ${nr_stat##*) }
        nr_pid=$2
    done
    printf '0'
}

# nr_uptime: the seconds since boot, in nr_now; the clock may leap during a wait.
nr_uptime() {
    read -r nr_now nr_x </proc/uptime || nr_fail '/proc/uptime cannot be read'
    nr_now=${nr_now%.*}
}

# nr_owner_of PATH: the owner of the path; a link is not followed.
nr_owner_of() {
    nr_x=$(stat -c '%U %u' -- "$1" 2>/dev/null) || nr_x=somebody
    case $nr_x in
    UNKNOWN*) printf 'uid %s' "${nr_x##* }" ;;
    *) printf '%s' "${nr_x%% *}" ;;
    esac
}

# nr_inspect: who can write to the working directory, as nr_ground:
#   private  only root and the current user
#   group    owned by root or the current user; a group of the distribution (staff) can write, too
#   shared   owned by root or the current user; all users can write, sticky: root's files stay
#   foreign  owned by another user, or writable without the sticky bit, or, for root, by a group of
#            persons
# nr_loose: from here on no link is followed, since other users can replace a directory on the way.
nr_inspect() {
    nr_out=$(nr_answer stat -c '%u %g %a %d:%i' .) || nr_fail "$(nr_reason "$nr_path" "$nr_out")"
    # shellcheck disable=SC2086 # numbers
    set -- $nr_out
    nr_id=$4 nr_at=${PWD%/}
    if [ "$1" != 0 ] && [ "$1" != "$nr_me" ]; then
        nr_ground=foreign
    elif [ $((0$3 & 02)) != 0 ]; then
        nr_ground=shared
        if [ $((0$3 & 01000)) = 0 ]; then nr_ground=foreign; fi
    elif [ $((0$3 & 020)) = 0 ] || { [ "$nr_me" != 0 ] && [ "$2" = "$nr_group" ]; }; then
        # With a umask of 002, a user's own group can write to all directories of hers.
        nr_ground=private
    elif [ "$nr_me" = 0 ] && [ "$2" -ge 1000 ]; then
        # login.defs(5), GID_MIN: any member could replace the file before it is written.
        nr_ground=foreign
    else
        nr_ground=group
        if [ $((0$3 & 01000)) = 0 ]; then nr_loose=1; fi
    fi
    if [ "$nr_ground" = foreign ]; then nr_loose=1; fi
}

# nr_walk PATH MAKE: change to the directory of PATH's last component, and set nr_name to that
# component ('.': PATH is a directory, and becomes the working directory). Each component is entered
# from its parent, and is the directory that was inspected, so that a user who replaces a directory
# redirects nothing. A link is followed only where it belongs to root or the current user, and other
# users cannot have made or replaced it.
# MAKE: '1' makes missing directories, '0' fails with status 1 where a directory is missing.
nr_walk() {
    # nr_own: the rest of PATH after the first link; a longer rest is within a link's target.
    nr_path=${1%/.} nr_rest=$1 nr_own=$1 nr_links=0 nr_loose=''
    nr_me=${nr_me:-$(id -u)} nr_group=${nr_group:-$(id -g)}
    cd -P / || nr_fail "$nr_path: cannot enter /"
    nr_inspect
    while :; do
        # Skip leading slashes and components ".".
        while :; do
            case $nr_rest in
            /*) nr_rest=${nr_rest#/} ;;
            ./*) nr_rest=${nr_rest#./} ;;
            *) break ;;
            esac
        done
        nr_name=${nr_rest%%/*}
        if [ -z "$nr_name" ] || [ "$nr_name" = . ]; then
            nr_name=.
            return 0
        fi
        if [ -L "./$nr_name" ]; then
            if ! nr_trusted; then
                nr_where=$nr_path:
                if [ "$nr_path" != "$nr_at/$nr_name" ]; then nr_where="$nr_path: $nr_at/$nr_name:"; fi
                nr_owner=$(nr_owner_of "./$nr_name")
                nr_fail "$nr_where a link of $nr_owner: not followed"
            fi
            nr_links=$((nr_links + 1))
            nr_target=$(readlink -- "./$nr_name") || nr_target=
            if [ "$nr_links" -gt 40 ] || [ -z "$nr_target" ]; then nr_nowhere; fi
            case $nr_rest in
            */*) nr_left=${nr_rest#*/} ;;
            *) nr_left= ;;
            esac
            if ! nr_in_target; then nr_own=$nr_left; fi
            nr_rest=$nr_target${nr_left:+/$nr_left}
            case $nr_target in
            /*)
                cd -P / || nr_fail "$nr_path: cannot enter /"
                nr_inspect
                ;;
            esac
            continue
        fi
        if [ ! -d "./$nr_name" ]; then
            case $nr_rest in */*) ;; *)
                if nr_in_target && [ ! -e "./$nr_name" ]; then nr_nowhere; fi
                return 0
                ;;
            esac
            if [ -e "./$nr_name" ]; then nr_fail "$nr_path: $nr_at/$nr_name: is no directory"; fi
            if [ "$2" = 0 ]; then return 1; fi
            if nr_in_target; then nr_nowhere; fi
            nr_keep dir "$nr_at/$nr_name" -
            nr_out=$(mkdir -- "./$nr_name" 2>&1) || nr_fail "$(nr_reason "$nr_path" "$nr_out")"
        fi
        nr_enter
        case $nr_rest in
        */*) nr_rest=${nr_rest#*/} ;;
        *) nr_rest= ;;
        esac
    done
}

# nr_trusted: whether the link nr_name belongs to root or the current user, and no other user can
# have made it.
nr_trusted() {
    [ -z "$nr_loose" ] || return 1
    # Elsewhere, any user may have made a hard link to a link of root.
    case $nr_ground:$(stat -c '%u %h' -- "./$nr_name" 2>/dev/null) in
    "private:0 "* | "private:$nr_me "* | *":0 1" | *":$nr_me 1") return 0 ;;
    esac
    return 1
}

# nr_in_target: whether the next component belongs to a link's target, and not to the path itself.
nr_in_target() { [ "${#nr_rest}" -gt "${#nr_own}" ]; }

# nr_nowhere: a link does not lead to a file or directory.
nr_nowhere() { nr_fail "$nr_path: a link that leads nowhere"; }

# nr_enter: go into the directory nr_name, which is no link.
nr_enter() {
    nr_seen=
    if [ "$nr_ground" != private ]; then
        # Other users could replace it by a link now.
        nr_seen=$(stat -c %d:%i -- "./$nr_name" 2>/dev/null) || nr_seen=-
    fi
    cd -P "./$nr_name" 2>/dev/null || nr_fail "$nr_path: cannot enter $nr_at/$nr_name"
    nr_inspect
    if [ -n "$nr_seen" ] && [ "$nr_seen" != "$nr_id" ]; then
        nr_fail "$nr_path: $nr_at: replaced while we looked: not followed"
    fi
}

# nr_holder_of PATH: the process that holds PATH's flock, in words; nothing when none is visible.
nr_holder_of() {
    nr_inode=$(stat -c %i -- "$1" 2>/dev/null) || return 0
    while read -r nr_x nr_x nr_x nr_x nr_number nr_where nr_x; do
        case $nr_where in *":$nr_inode")
            if [ -d "/proc/$nr_number" ]; then
                nr_x=$(tr -s '[:cntrl:]' ' ' <"/proc/$nr_number/cmdline" 2>/dev/null | head -c 120)
                printf 'process %s of %s (%s)' "$nr_number" "$(nr_owner_of "/proc/$nr_number")" "${nr_x% }"
                return
            fi
            ;;
        esac
    done </proc/locks
}

# nr_lock RUN USER WAIT: lock this node until the connection and its change have ended (a cut
# connection does not stop a change), or fail with the name of the holder.
# Only root may open the file: every user who can read a file can hold its flock.
nr_lock() {
    [ "$(id -u)" = 0 ] || nr_fail 'not root: add --sudo, or log in as root (-u root)'
    command -v flock >/dev/null 2>&1 || nr_fail 'flock is not installed (util-linux)'
    nr_file=/run/nodeready.lock
    nr_walk "${nr_file%/*}/." 0 || nr_fail "$nr_file: there is no such directory"
    [ "$nr_ground" = private ] || nr_fail "$nr_at: others than root can write there: no lock is safe in it"
    nr_name=${nr_file##*/}
    [ ! -L "./$nr_name" ] || nr_fail "$nr_file: is no regular file"
    nr_uptime
    nr_until=$((nr_now + $3))
    while :; do
        if [ -e "./$nr_name" ]; then
            [ -f "./$nr_name" ] || nr_fail "$nr_file: is no regular file"
            case $(stat -c '%u %a' "./$nr_name" 2>/dev/null) in
            '0 600') ;;
            *) nr_renew ;;
            esac
        fi
        nr_out=$( (umask 077 && : >>"./$nr_name") 2>&1) || nr_fail "$(nr_reason "$nr_file" "$nr_out")"
        exec 9>>"./$nr_name"
        if ! flock -w 10 9; then
            nr_out=$(nr_holder_of "./$nr_name")
            nr_fail "cannot lock $nr_file: ${nr_out:-another process} holds it; waited 10 s"
        fi
        # Another run may have replaced the file.
        if [ "$(stat -c %d:%i "./$nr_name" 2>/dev/null)" != "$(stat -Lc %d:%i /proc/self/fd/9)" ]; then
            exec 9>&-
            continue
        fi
        nr_run='' nr_holder='' nr_hstart='' nr_worker='' nr_wstart='' nr_holder_user='' nr_since=''
        read -r nr_run nr_holder nr_hstart nr_worker nr_wstart nr_holder_user nr_since <"./$nr_name" || :
        if [ -n "$nr_run" ] && [ "$nr_run" != "$1" ] &&
            { nr_lives "$nr_holder" "$nr_hstart" || nr_lives "$nr_worker" "$nr_wstart"; }; then
            exec 9>&-
            nr_uptime
            if [ "$nr_now" -ge "$nr_until" ]; then
                nr_fail "locked by $nr_holder_user since $nr_since; waited $3 s"
            fi
            sleep 1
            continue
        fi
        # The last change may have been killed before it could remove its temporary files.
        nr_left=
        if ! nr_lives "$nr_worker" "$nr_wstart"; then nr_left=$(tail -n +2 "./$nr_name"); fi
        if [ "$nr_run" != "$1" ]; then
            nr_holder=$(nr_anchor)
            nr_hstart=$(nr_start "$nr_holder")
            nr_holder_user=$2
            nr_since=$(date +%Y-%m-%dT%H:%M:%S)
        fi
        printf '%s %s %s %s %s %s %s\n' "$1" "$nr_holder" "${nr_hstart:--}" "$$" \
            "$(nr_start $$)" "$nr_holder_user" "$nr_since" >"./$nr_name" || nr_fail "no space left on $nr_file"
        exec 9>&-
        nr_locked=1
        if [ -n "$nr_left" ]; then nr_sweep "$nr_left"; fi
        cd -P / || nr_fail 'cannot enter /'
        return
    done
}

# nr_sweep PATHS: remove these temporary files, which nr_write has noted in the lock file.
nr_sweep() {
    printf '%s\n' "$1" | while IFS= read -r nr_x; do
        case ${nr_x##*/} in .nodeready.??????) nr_remove "$nr_x" ;; esac
    done 2>/dev/null || :
}

# nr_renew: replace a lock file that other users could open by a new file with the same content,
# which no process has open. In /run, where only root can write.
nr_renew() {
    rm -f -- ./.nodeready.??????
    nr_out=$(nr_answer mktemp ./.nodeready.XXXXXX) || nr_fail "$(nr_reason "$nr_file" "$nr_out")"
    nr_tmp=$nr_out
    cat "./$nr_name" >"$nr_tmp" || nr_fail "no space left on $nr_file"
    mv -f -- "$nr_tmp" "./$nr_name" || nr_fail "cannot write $nr_file"
    nr_tmp=
}

# --- What `deploy --undo` takes back (nodeready/sh/undo.sh): a line for each thing, written before its
# first change, STEP KIND THING STATE. STATE is how it was before nodeready, without spaces in THING:
#   file PATH    number of the copy in this directory; '-': no such file; '=': a block of nodeready's
#   wrote PATH   the sha256 of a content that nodeready has put there; '-': removed
#   user, dir, mode, sysctl, unit, sebool, grub, run: see nr_keep_state and the calls of nr_keep
nr_kept=/var/lib/nodeready/undo nr_step=

# nr_begin STEP: keep from here on what changes, in root's own directory.
nr_begin() {
    (
        nr_walk "$nr_kept/." 1
        [ "$nr_ground$nr_loose" = private ] || nr_fail "$nr_kept: others than root can write there"
        nr_out=$( (umask 077 && chmod 0700 . && : >>./list) 2>&1) || nr_fail "$(nr_reason "$nr_kept" "$nr_out")"
    ) || exit 1
    nr_step=$1
}

# nr_keep KIND THING STATE: the first line about a thing stays; a directory of nodeready's has one.
nr_keep() {
    if [ -z "$nr_step" ] || grep -qF -e " $1 $2 " -e " dir $2 " -- "$nr_kept/list"; then return; fi
    nr_note_line "$1 $2 $3"
}
nr_note_line() {
    nr_out=$( { printf '%s\n' "$nr_step $1" >>"$nr_kept/list" && sync -- "$nr_kept/list"; } 2>&1) ||
        nr_fail "$(nr_reason "$nr_kept" "$nr_out")"
}

# nr_keep_file SHA256: the file nr_target (nr_path) gets this content now; '-': it is removed. What
# was there is copied once; nothing of others is in a file with nodeready's name.
nr_keep_file() {
    [ -n "$nr_step" ] || return 0
    if ! grep -qF -e " file $nr_path " -- "$nr_kept/list"; then
        nr_state=-
        if [ -f "$nr_target" ]; then
            nr_state=$(($(wc -l <"$nr_kept/list") + 1))
            if grep -qF -e '# >>> nodeready:' -- "$nr_target"; then nr_state='='; fi
            case $nr_path in *nodeready*) nr_state=- ;; esac
        fi
        case $nr_state in
        - | =) ;;
        *) nr_out=$({ cp -a -- "$nr_target" "$nr_kept/$nr_state" && sync -- "$nr_kept/$nr_state"; } 2>&1) ||
            nr_fail "$(nr_reason "$nr_kept" "$nr_out")" ;;
        esac
        nr_keep file "$nr_path" "$nr_state"
    fi
    if ! grep -q -e " wrote $nr_path $1\$" -- "$nr_kept/list"; then nr_note_line "wrote $nr_path $1"; fi
}

# nr_keep_state COMMAND...: keep the state that a command changes.
nr_keep_state() {
    [ -n "$nr_step" ] || return 0
    case $1 in
    chmod | chown)
        for nr_x in "$@"; do
            case $nr_x in /*) nr_keep mode "$nr_x" "$(stat -Lc '%u:%g %a' -- "$nr_x" 2>/dev/null)" ;; esac
        done
        ;;
    sysctl)
        nr_x=${3%%=*}
        nr_keep sysctl "$nr_x" "$(cat "/proc/sys/$(printf %s "$nr_x" | tr . /)" 2>/dev/null)"
        ;;
    setsebool) nr_keep sebool "$3" on ;;
    systemctl)
        for nr_x in "$@"; do :; done
        case $2 in
        disable | mask) nr_keep unit "$nr_x" "$(systemctl is-enabled "$nr_x" 2>/dev/null) $(systemctl is-active "$nr_x" 2>/dev/null)" ;;
        daemon-reload) nr_keep run "$1" "$2" ;;
        esac
        ;;
    grubby)
        for nr_x in "$@"; do
            case $nr_x in
            --args=* | --remove-args=*)
                for nr_word in ${nr_x#*=}; do nr_keep grub "$nr_word" "${nr_x%%=*}"; done
                ;;
            esac
        done
        ;;
    update-grub | grub*-mkconfig)
        nr_x=$1
        shift
        nr_keep run "$nr_x" "$*"
        ;;
    esac
}

# nr_write PATH MODE BASE64 OLD [VALIDATOR...]: the file gets exactly these bytes, or stays unchanged.
# A link of root stays, and its target is replaced; mode and owner of an existing file stay.
# OLD is the sha256 of the content in the plan ('-': no such file, '*': any content).
# BASE64 '-': the content comes from file descriptor 3, packed by gzip. The validator's last argument
# is the new file.
nr_write() {
    nr_walk "$1" 1
    nr_mode=$2 nr_data=$3 nr_old=$4
    shift 4
    [ "$nr_name" != . ] || nr_fail "$nr_path: is a directory"
    case $nr_ground in
    shared | foreign)
        nr_owner=$(nr_owner_of .)
        nr_fail "$nr_path: ${nr_at:-/}, a directory of $nr_owner: others can write there"
        ;;
    esac
    nr_target=./$nr_name
    if [ -e "$nr_target" ] && [ ! -f "$nr_target" ]; then nr_fail "$nr_path: $nr_at/$nr_name is no regular file"; fi
    case $nr_old in
    '*') ;;
    -) [ ! -e "$nr_target" ] || nr_fail "$nr_path: appeared since it was looked at; run again" ;;
    *)
        nr_out=$(sha256sum <"$nr_target") 2>/dev/null || nr_out=
        [ "${nr_out%% *}" = "$nr_old" ] || nr_fail "$nr_path: changed since it was looked at; run again"
        ;;
    esac
    # Files of a killed run.
    rm -f -- ./.nodeready.??????
    nr_out=$(nr_answer mktemp ./.nodeready.XXXXXX) || nr_fail "$(nr_reason "$nr_path" "$nr_out")"
    nr_tmp=$nr_out
    if [ -n "$nr_locked" ]; then printf '%s\n' "$nr_at/${nr_tmp#./}" >>"$nr_file"; fi
    nr_there=
    if [ -e "$nr_target" ]; then
        nr_there=1
        # No setuid: the new content has not been given this right.
        nr_mode=$(stat -c %a -- "$nr_target")
        nr_mode=$(printf '%o' $((0$nr_mode & 0777)))
        chown "$(stat -c %u:%g -- "$nr_target")" "$nr_tmp" || nr_fail "$nr_path: cannot keep the owner"
        if [ -e /sys/fs/selinux/enforce ]; then chcon --reference="$nr_target" -- "$nr_tmp" 2>/dev/null; fi
    fi
    chmod "$nr_mode" "$nr_tmp" || nr_fail "$nr_path: cannot set the mode"
    if [ "$nr_data" = - ]; then
        command -v gzip >/dev/null 2>&1 || nr_fail "$nr_path: gzip is not installed"
        nr_out=$({ base64 -d <&3 | gzip -dc >"$nr_tmp"; } 2>&1) || nr_fail "$(nr_reason "$nr_path" "$nr_out")"
    else
        nr_out=$({ printf '%s' "$nr_data" | base64 -d >"$nr_tmp"; } 2>&1) || nr_fail "$(nr_reason "$nr_path" "$nr_out")"
    fi
    if [ $# -gt 0 ]; then
        nr_out=$("$@" "$nr_tmp" 2>&1) || nr_fail "$nr_path: the new file is not valid: $nr_out"
    fi
    nr_out=$(sync -- "$nr_tmp" 2>&1) || nr_fail "$(nr_reason "$nr_path" "$nr_out")"
    if [ -n "$nr_step" ]; then
        nr_out=$(sha256sum <"$nr_tmp")
        nr_keep_file "${nr_out%% *}"
    fi
    nr_out=$(mv -f -- "$nr_tmp" "$nr_target" 2>&1) || nr_fail "$(nr_reason "$nr_path" "$nr_out")"
    nr_tmp=
    if [ -e /sys/fs/selinux/enforce ] && [ -z "$nr_there" ]; then restorecon -- "$nr_at/$nr_name" 2>/dev/null; fi
    sync -- . 2>/dev/null || :
    cd -P / || nr_fail 'cannot enter /'
}

# nr_remove PATH: remove a file of nodeready. Of a link, the link itself is removed.
nr_remove() {
    case ${1%/*} in
    '' | "$1") nr_fail "$1: no file of nodeready" ;;
    esac
    if nr_walk "${1%/*}/." 0; then
        nr_path=$1 nr_target=./${1##*/}
        if [ -n "$nr_step" ] && [ -f "$nr_target" ]; then nr_keep_file -; fi
        nr_out=$(rm -f -- "./${1##*/}" 2>&1) || nr_fail "$(nr_reason "$1" "$nr_out")"
    fi
    cd -P / || nr_fail 'cannot enter /'
}

# nr_directory PATH MODE: the directory exists with this mode, and belongs to root.
nr_directory() {
    nr_walk "$1/." 1
    nr_out=$(nr_answer stat -c %u .) || nr_fail "$(nr_reason "$1" "$nr_out")"
    if [ "$nr_out" != 0 ] && [ "$nr_out" != "$nr_me" ]; then
        nr_owner=$(nr_owner_of .)
        nr_fail "$1: a directory of $nr_owner: not changed"
    fi
    nr_keep mode "$1" "$(stat -c '%u:%g %a' .)"
    nr_out=$(chmod -- "$2" . 2>&1) || nr_fail "$(nr_reason "$1" "$nr_out")"
    cd -P / || nr_fail 'cannot enter /'
}

# nr_do ACTION COMMAND...: run it; where it fails, its last line of output is the reason.
nr_do() {
    nr_what=$1
    shift
    nr_keep_state "$@"
    nr_out=$("$@" 2>&1) || {
        nr_rc=$?
        nr_out=$(printf '%s\n' "$nr_out" | grep -v '^[[:space:]]*$' | tail -n 1)
        nr_fail "$nr_what: ${nr_out:-exit status $nr_rc}"
    }
}
