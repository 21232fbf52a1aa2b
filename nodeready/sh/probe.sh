# Read-only helpers of the probes. NR is the random word of this run: it begins the lines that a probe
# itself writes. Foreign content (a file, a tool's output) follows a word of the probe in its line,
# or is encoded: it cannot imitate a line of the probe, even with that word.

# nr_trap: print the exit status of this (sub)shell as its last line.
nr_trap() {
    trap 'nr_rc=$?; printf "\n@%s rc %s\n" "$NR" "$nr_rc"' EXIT
    # Without this, bash would run the exit trap when the timeout ends the section.
    trap 'trap - EXIT; exit 143' TERM
}

# nr_value NAME FILE: "NAME=first line of FILE", or nothing when it cannot be read. An empty line is
# a value. The read of dash and busybox takes single bytes, and a number in /proc/sys ends after its
# first: "1" of "1024". So a line without an end is read again, at once, by a process.
nr_value() {
    nr_line=
    if ! { IFS= read -r nr_line <"$2"; } 2>/dev/null; then
        if [ -z "$nr_line" ]; then return; fi
        nr_line=$(cat -- "$2")
    fi
    nr_say "$1" "$nr_line"
}

# nr_say NAME TEXT: "NAME=first line of TEXT".
nr_say() {
    printf '%s=%s\n' "$1" "${2%%
*}"
}

# nr_writable PATH: set nr_at to the nearest existing directory of PATH and its parents. Where not even
# root can write in it, print "nowhere=", "nodir=" or "fixed=" with the obstacle, and fail.
nr_writable() {
    nr_at=$1
    while [ ! -e "$nr_at" ] && [ ! -L "$nr_at" ]; do
        nr_at=${nr_at%/*}
        nr_at=${nr_at:-/}
    done
    if [ ! -e "$nr_at" ]; then nr_say nowhere "$nr_at"
    elif [ ! -d "$nr_at" ]; then nr_say nodir "$nr_at"
    elif [ ! -w "$nr_at" ]; then nr_say fixed "$nr_at"
    else return 0
    fi
    return 1
}

# nr_bar_lines TEXT: each line of a tool's output after a bar, without empty lines.
nr_bar_lines() {
    set -f
    IFS='
'
    # shellcheck disable=SC2086 # one word per line
    if [ -n "$1" ]; then printf '|%s\n' $1; fi
    unset IFS
    set +f
}

# nr_lines KIND FILE...: FILE:LINE:TEXT of the lines of the existing files. KIND:
# - all;
# - raw: all, without line numbers;
# - set: without comments and empty lines;
# - routes: of /proc/net, without line numbers; without link-local and multicast networks, routes to
#   this node itself and to containers; of fib_trie only leaves and this node's addresses.
# In a shell with many sections, one process reads the files of all sections at the end (NR_LATER):
# until then, a mark stands for the section's files.
nr_lines() {
    nr_kind=$1
    shift
    if [ -n "${NR_LATER:-}" ] && nr_later "$@"; then return; fi
    nr_grep "$@"
    :
}
# No line of a configuration file matches $nr_beside.
nr_comment='^[[:space:]]*([#;]|$)'
nr_beside='^f[ef][0-9a-f]{30}|^(cali|veth|lxc|gke|azv)[^[:space:]]*([[:space:]][0-9A-F]{8}){2}'
nr_beside="$nr_beside|^[0-9a-f]{32} .*[[:space:]]lo\$|^ *\\+-- |^ +/[0-9]+ .*(UNI|BROAD|MULTI)CAST\$"
# A status above 125: grep was not run.
nr_grep() {
    case $nr_kind in
    all) grep -asHn '' "$@" /dev/null ;;
    raw) grep -asH '' "$@" /dev/null ;;
    set) grep -asHnvE -e "$nr_comment" -e "$nr_beside" "$@" /dev/null ;;
    routes) grep -asHvE -e "$nr_beside" "$@" /dev/null ;;
    esac
    [ $? -le 125 ]
}
# nr_later FILE...: note the files for NR_LATER, after a file of one line that separates the sections.
# Fails for a name that would not be one word in the list.
nr_later_all='' nr_later_set=''
nr_later() {
    set -f
    IFS='
'
    nr_joined=$*
    nr_count=$#
    # shellcheck disable=SC2086 # one word per file
    nr_is_count $nr_joined
    nr_is=$?
    unset IFS
    set +f
    if [ "$nr_is" != 0 ] || [ ! -r "$NR_LATER" ]; then return 1; fi
    nr_joined="
$NR_LATER
$nr_joined"
    case $nr_kind in
    all | raw) nr_later_all="$nr_later_all$nr_joined" ;;
    set | routes) nr_later_set="$nr_later_set$nr_joined" ;;
    esac
    printf '\n@%s later %s\n' "$NR" "$nr_kind"
}
nr_is_count() {
    [ $# = "$nr_count" ]
}

# nr_seek PATTERN FILE...: note an extended pattern, for lines in any case, and files.
nr_patterns='' nr_places=''
nr_seek() {
    nr_patterns="$nr_patterns
$1"
    shift
    for nr_place in "$@"; do nr_places="$nr_places
$nr_place"; done
}
# nr_search: the noted files' lines with one of the noted patterns, into nr_hits: FILE:LINE:TEXT. The
# same process reads the lines for nr_self, as the shell itself would need 900 calls.
nr_searched='' nr_own=''
nr_search() {
    nr_searched=1
    nr_seek '^(Uid|CapEff|CapBnd):[[:space:]]' /proc/self/status
    set -f
    IFS='
'
    # shellcheck disable=SC2086 # one word per file
    nr_hits=$(grep -asHniE -e "${nr_patterns#?}" $nr_places /dev/null) || [ $? -le 125 ] || exit 1
    for nr_row in $nr_hits; do
        case $nr_row in /proc/self/status:*) nr_own="$nr_own ${nr_row#/*:*:}" ;; esac
    done
    unset IFS
    set +f
}
# nr_find SECTION PATTERN...: set nr_found to the rows of nr_hits that match one of these patterns of
# rows. In a shell with this section alone, it searches first.
nr_find() {
    if [ -z "$nr_searched" ]; then
        "nr_seek_$1"
        nr_search
    fi
    shift
    nr_found=
    set -f
    IFS='
'
    for nr_row in $nr_hits; do
        for nr_like in "$@"; do
            # shellcheck disable=SC2254 # a pattern
            case $nr_row in $nr_like) nr_found="$nr_found$nr_row
"; break ;; esac
        done
    done
    unset IFS
    set +f
}

# nr_exact FILE...: the bytes of each file, in base64, between two marks. Of a small file with a known
# size, its size and its lines, which need no further process.
nr_exact() {
    for nr_file in "$@"; do
        if [ -f "$nr_file" ] && [ -r "$nr_file" ]; then
            printf '\n@%s file %s\n' "$NR" "$nr_file"
            if [ -n "${NR_LATER:-}" ] && nr_seen_at "$nr_file" && [ "$nr_size" -le 8192 ]; then
                printf 'size=%s\n' "$nr_size"
                nr_lines all "$nr_file"
            elif [ -s "$nr_file" ]; then
                base64 "$nr_file"
            fi
            printf '\n@%s eof\n' "$NR"
        fi
    done
}

# nr_rights FILE...: "at=MODE UID GID SIZE PATH" (MODE in hexadecimal, with the type) of each file
# and of every directory on the way to it, with links followed; "link=FILE PATH" of a link, without
# a PATH where its target does not exist. A name with other characters is skipped. The same for
# $nr_folders, patterns of directories with all directories on the way to them.
nr_folders='' nr_rows=''
nr_rights() {
    nr_all=" $nr_folders "
    for nr_file in "$@"; do
        shift
        case $nr_file in *[!A-Za-z0-9/._+-]*) continue ;; esac
        set -- "$@" "$nr_file"
        nr_real=
        if [ -L "$nr_file" ]; then
            if [ -e "$nr_file" ]; then nr_real=$(readlink -f -- "$nr_file"); fi
            case $nr_real in *[!A-Za-z0-9/._+-]*) continue ;; esac
            printf 'link=%s %s\n' "$nr_file" "$nr_real"
        fi
        for nr_dir in "$nr_file" "$nr_real"; do
            while nr_dir=${nr_dir%/*}; [ -n "$nr_dir" ]; do
                case $nr_all in *" $nr_dir "*) break ;; esac
                nr_all="$nr_all$nr_dir "
            done
        done
    done
    # shellcheck disable=SC2086 # one word per directory or pattern
    nr_rows=$(stat -Lc 'at=%f %u %g %s %n' -- / "$@" $nr_all 2>/dev/null)
    printf '%s\n' "$nr_rows"
    nr_rows="$nr_rows
"
}

# nr_seen_at PATH: nr_mode (a number, without the type), nr_uid, nr_gid and nr_size, from the output of
# nr_rights in this shell, without a further process; fails for a path that is not in it.
nr_seen_at() {
    case $nr_rows in
    *" $1
"*) ;;
    *) return 1 ;;
    esac
    # shellcheck disable=SC2086 # the last four words are the file's
    set -f && set -- ${nr_rows%%" $1
"*} && set +f
    shift $(($# - 4))
    nr_mode=$((0x${1#at=} & 4095)) nr_uid=$2 nr_gid=$3 nr_size=$4
}

# nr_have NAME...: "have=NAME" for each command that is installed.
nr_have() {
    for nr_name in "$@"; do
        if command -v "$nr_name" >/dev/null 2>&1; then printf 'have=%s\n' "$nr_name"; fi
    done
}

# nr_there NAME FILE...: "NAME=FILE" for each file or link that is there.
nr_there() {
    nr_label=$1 nr_row=
    shift
    for nr_place in "$@"; do
        if [ -e "$nr_place" ] || [ -L "$nr_place" ]; then nr_row="$nr_row$nr_label=$nr_place
"; fi
    done
    printf %s "$nr_row"
}

# nr_status NAME /proc/PID: set nr_field to the first word of this line of the file status; to nothing
# without the line.
nr_status() {
    nr_field=
    while read -r nr_key nr_field nr_x; do
        if [ "$nr_key" = "$1:" ]; then break; fi
    done 2>/dev/null <"$2/status"
}

# nr_self: set nr_self_uid and nr_self_euid, the numbers of this user, and nr_self_caps and nr_self_bound,
# the masks CapEff and CapBnd; once in a shell.
nr_self() {
    if [ -n "${nr_self_bound:-}" ]; then return; fi
    nr_self_uid='' nr_self_euid='' nr_self_caps='' nr_self_bound=''
    # shellcheck disable=SC2086 # Uid: four numbers, CapEff: a mask, CapBnd: a mask
    set -- $nr_own
    if [ $# = 9 ]; then
        nr_self_uid=$2 nr_self_euid=$3 nr_self_caps=$7 nr_self_bound=$9
        return
    fi
    while read -r nr_key nr_field nr_more; do
        case $nr_key in
        Uid:) nr_self_uid=$nr_field nr_self_euid=${nr_more%%[!0-9]*} ;;
        CapEff:) nr_self_caps=$nr_field ;;
        CapBnd:) nr_self_bound=$nr_field; break ;;
        esac
    done 2>/dev/null </proc/self/status
}

# nr_find_setpriv: set nr_me to the number of this user, and nr_setpriv to the first setpriv of PATH; to
# nothing without one, and for busybox's, which changes no user.
nr_find_setpriv() {
    nr_self
    nr_me=$nr_self_euid
    nr_setpriv=
    IFS=:
    for nr_dir in $PATH; do
        if [ -x "$nr_dir/setpriv" ]; then nr_setpriv=$nr_dir/setpriv; break; fi
    done
    unset IFS
    if [ "$nr_setpriv" -ef /bin/busybox ]; then nr_setpriv=; fi
}

# nr_is_roots /proc/PID: whether root started the process: its real user is root. Any user can start a
# setuid program, under any name.
nr_is_roots() {
    nr_status Uid "$1"
    [ "$nr_field" = 0 ]
}
