# The only way in which we change a node. Sourced in front of every change; runs as root.

# nr_fail TEXT: one line on standard error, and out. Nothing is left half-written.
nr_fail() {
    printf 'nodeready: %s\n' "$*" >&2
    exit 1
}

# nr_reason PATH TEXT: a tool's error in our words. A full or read-only file system is named by path.
nr_reason() {
    case $2 in
    *'No space left'*) printf 'no space left on %s' "$1" ;;
    *'Read-only file system'*) printf 'read-only file system: %s' "$1" ;;
    *'quota exceeded'*) printf 'disk quota exceeded: %s' "$1" ;;
    *) printf '%s: %s' "$1" "${2##*: }" ;;
    esac
}

nr_tmp=
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

# nr_lives PID START: this very process still runs.
nr_lives() { [ "${1:-0}" -gt 0 ] 2>/dev/null && [ "$(nr_start "$1")" = "$2" ]; }

# nr_anchor: the nearest ancestor that is no shell: the connection's sshd, or the local program.
# When the connection dies, it is gone, and the lock with it.
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

# nr_lock RUN WHO WAIT: this node is ours until our connection ends and with it the change that it
# was making (a cut connection does not stop one), or fail naming the holder.
nr_lock() {
    [ "$(id -u)" = 0 ] || nr_fail 'not root: run with sudo'
    command -v flock >/dev/null 2>&1 || nr_fail 'flock is not installed (util-linux)'
    nr_file=/run/nodeready.lock
    nr_until=$(($(date +%s) + $3))
    while :; do
        { exec 9>>"$nr_file"; } 2>/dev/null || nr_fail "cannot write $nr_file"
        flock -w 10 9 || nr_fail "cannot lock $nr_file"
        nr_run='' nr_holder='' nr_hstart='' nr_worker='' nr_wstart='' nr_who='' nr_since=''
        read -r nr_run nr_holder nr_hstart nr_worker nr_wstart nr_who nr_since <"$nr_file" || :
        if [ -n "$nr_run" ] && [ "$nr_run" != "$1" ] &&
            { nr_lives "$nr_holder" "$nr_hstart" || nr_lives "$nr_worker" "$nr_wstart"; }; then
            exec 9>&-
            if [ "$(date +%s)" -ge "$nr_until" ]; then
                nr_fail "locked by $nr_who since $nr_since; waited $3 s"
            fi
            sleep 1
            continue
        fi
        if [ "$nr_run" != "$1" ]; then
            nr_holder=$(nr_anchor)
            nr_hstart=$(nr_start "$nr_holder")
            nr_who=$2
            nr_since=$(date +%Y-%m-%dT%H:%M:%S)
        fi
        printf '%s %s %s %s %s %s %s\n' "$1" "$nr_holder" "${nr_hstart:--}" "$$" \
            "$(nr_start $$)" "$nr_who" "$nr_since" >"$nr_file" || nr_fail "no space left on $nr_file"
        exec 9>&-
        return
    done
}

# nr_write PATH MODE BASE64 OLD [VALIDATOR...]: the file becomes exactly these bytes, or stays as it was.
# A link keeps standing and its target is replaced; mode and owner of an existing file stay.
# OLD is the sha256 of what the plan was made from ('-': no such file, '*': whatever is there).
# BASE64 '-' takes the content, packed by gzip, from file descriptor 3. The validator gets the new file as last word.
nr_write() {
    nr_path=$1 nr_mode=$2 nr_data=$3 nr_old=$4
    shift 4
    nr_target=$(readlink -f -- "$nr_path" 2>/dev/null) || nr_target=
    if [ -L "$nr_path" ] && [ ! -e "$nr_path" ]; then nr_fail "$nr_path: a link that leads nowhere"; fi
    if [ -z "$nr_target" ]; then
        nr_out=$(mkdir -p -- "${nr_path%/*}" 2>&1) || nr_fail "$(nr_reason "$nr_path" "$nr_out")"
        nr_target=$(readlink -f -- "$nr_path") || nr_fail "$nr_path: a link that leads nowhere"
    fi
    [ ! -d "$nr_target" ] || nr_fail "$nr_path: is a directory"
    if [ -e "$nr_target" ] && [ ! -f "$nr_target" ]; then nr_fail "$nr_path: $nr_target is no regular file"; fi
    case $nr_old in
    '*') ;;
    -) [ ! -e "$nr_target" ] || nr_fail "$nr_path: appeared since it was looked at; run again" ;;
    *)
        nr_out=$(sha256sum <"$nr_target") 2>/dev/null || nr_out=
        [ "${nr_out%% *}" = "$nr_old" ] || nr_fail "$nr_path: changed since it was looked at; run again"
        ;;
    esac
    nr_dir=${nr_target%/*}
    nr_dir=${nr_dir:-/}
    # What a killed run of ours left here.
    rm -f -- "$nr_dir"/.nodeready.??????
    nr_out=$(mktemp "$nr_dir/.nodeready.XXXXXX" 2>&1) || nr_fail "$(nr_reason "$nr_path" "$nr_out")"
    nr_tmp=$nr_out
    nr_there=
    if [ -e "$nr_target" ]; then
        nr_there=1
        nr_mode=$(stat -c %a -- "$nr_target")
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
    nr_out=$(mv -f -- "$nr_tmp" "$nr_target" 2>&1) || nr_fail "$(nr_reason "$nr_path" "$nr_out")"
    nr_tmp=
    if [ -e /sys/fs/selinux/enforce ] && [ -z "$nr_there" ]; then restorecon -- "$nr_target" 2>/dev/null; fi
    sync -- "$nr_dir" 2>/dev/null || :
}

# nr_remove PATH: the file is gone. Only for files of ours.
nr_remove() {
    nr_out=$(rm -f -- "$1" 2>&1) || nr_fail "$(nr_reason "$1" "$nr_out")"
}

# nr_directory PATH MODE: the directory is there with this mode.
nr_directory() {
    nr_out=$(mkdir -p -- "$1" 2>&1) || nr_fail "$(nr_reason "$1" "$nr_out")"
    nr_out=$(chmod -- "$2" "$1" 2>&1) || nr_fail "$(nr_reason "$1" "$nr_out")"
}

# nr_do WHAT COMMAND...: run it; its last line of output is the reason when it fails.
nr_do() {
    nr_what=$1
    shift
    nr_out=$("$@" 2>&1) || {
        nr_rc=$?
        nr_out=$(printf '%s\n' "$nr_out" | grep -v '^[[:space:]]*$' | tail -n 1)
        nr_fail "$nr_what: ${nr_out:-exit status $nr_rc}"
    }
}
