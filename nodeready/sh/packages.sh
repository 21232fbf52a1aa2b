# Install packages with the distribution's manager: at most one refresh of the index, a limit on the
# wait for its lock, and one line about a failure, in the mirror's own words.

# nr_left: the seconds until the wait for locks is over.
nr_left() {
    nr_uptime
    if [ "$nr_now" -lt "$nr_until" ]; then printf '%s' "$((nr_until - nr_now))"; else printf 0; fi
}

# nr_line PATTERN...: the first line of nr_out that matches a pattern; earlier patterns first.
nr_line() {
    for nr_pattern in "$@"; do
        if printf '%s\n' "$nr_out" | grep -E -m 1 -e "$nr_pattern"; then return; fi
    done
}

# nr_locked: fail with the name of the process that holds the lock in nr_out.
nr_locked() {
    nr_text=$(nr_line 'Could not get lock' 'locked by' 'System management is locked' 'pid [0-9]' 'lock')
    nr_pid=$(printf '%s\n' "$nr_out" | sed -nE 's/.*(process|pid|locked by) ([0-9]+).*/\2/p' | head -n 1)
    nr_file=$(printf '%s\n' "$nr_text" | sed -nE 's/.*(Could not get lock|transaction lock on) (\/[^ ]*[^ .]).*/\2/p')
    if [ -z "$nr_pid" ] && [ -n "$nr_file" ]; then
        # Older apt names no process: the kernel's table of locks has it.
        nr_inode=$(stat -Lc %i -- "$nr_file" 2>/dev/null)
        while read -r nr_x nr_x nr_x nr_x nr_number nr_where nr_x; do
            case $nr_where in *":$nr_inode") nr_pid=$nr_number ;; esac
        done </proc/locks
    fi
    nr_who=''
    if [ -n "$nr_pid" ] && [ -r "/proc/$nr_pid/cmdline" ]; then
        nr_who=$(tr -s '[:cntrl:]' ' ' <"/proc/$nr_pid/cmdline" 2>/dev/null | head -c 120)
    fi
    if [ -n "$nr_pid" ]; then
        nr_fail "${nr_file:-the package manager} is locked by process $nr_pid (${nr_who% }); waited $nr_wait s"
    fi
    nr_fail "the package manager is locked: $nr_text; waited $nr_wait s"
}

# nr_try COMMAND...: run it, with its output in nr_out; repeat while it waits for a lock.
nr_try() {
    while :; do
        nr_rc=0
        nr_out=$("$@" 2>&1) || nr_rc=$?
        [ "$nr_rc" != 0 ] || return 0
        case $nr_out in
        *'Could not get lock'* | *'already locked by'* | *'holding the yum lock'* | \
            *'another copy is running'* | *'transaction lock'* | *'System management is locked'*)
            if [ "$(nr_left)" = 0 ]; then nr_locked; fi
            sleep 1
            ;;
        *) return "$nr_rc" ;;
        esac
    done
}

# The three managers. needrestart must not restart services with jobs. Configuration files that an
# administrator changed stay. A package that would remove other packages is not installed. Apt must
# not treat an unknown name as a pattern.
nr_apt() {
    DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 NEEDRESTART_MODE=l UCF_FORCE_CONFFOLD=1 \
        apt-get -q -y -o DPkg::Lock::Timeout="$(nr_left)" -o Dpkg::Use-Pty=0 -o APT::Cmd::Pattern-Only=true \
        -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 \
        -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold "$@"
}
nr_dnf() {
    if [ "$nr_manager" = dnf ]; then set -- --setopt=install_weak_deps=0 "$@"; fi
    "$nr_manager" -y --setopt=exit_on_lock=1 "$@"
}
nr_zypper() {
    nr_code=0
    ZYPP_LOCK_TIMEOUT=$(nr_left) zypper --non-interactive "$@" || nr_code=$?
    # 100 to 103, 106, 107: done, with a hint (zypper(8), EXIT CODES).
    case $nr_code in 100 | 101 | 102 | 103 | 106 | 107) nr_code=0 ;; esac
    return "$nr_code"
}
nr_install() {
    case $nr_manager in
    apt-get) nr_try nr_apt --no-install-recommends --no-remove install -- "$@" ;;
    zypper) nr_try nr_zypper install --no-recommends -- "$@" ;;
    *) nr_try nr_dnf install -- "$@" ;;
    esac
}

nr_unknown='Unable to locate package|has no installation candidate|Unable to find a match|No match for argument|No package .* available|No provider of'
nr_network='Failed to fetch|[Cc]url error|curl#|Error message: |Status code: |Cannot download|not found on medium|seems to be corrupted'

# nr_refused: the answer of a mirror that refused a file in nr_out; nothing when all answered.
nr_refused() {
    # Apt prints the cause below "Err:1 URL"; without a warning, a second try has succeeded.
    nr_text=
    if [ -n "$(nr_line '^(E: |W: Failed to fetch|W: Some index files failed)')" ]; then
        nr_text=$(printf '%s\n' "$nr_out" |
            sed -nE '/^Err:[0-9]+ /{N;s/^Err:[0-9]+ ([^ ]+)[^\n]*\n[[:space:]]*/\1: /p;q;}')
    fi
    if [ -n "$nr_text" ]; then printf '%s\n' "$nr_text"; else nr_line "$nr_network"; fi
}

# nr_cause: why the last installation failed, in one line of the tool's output.
nr_cause() {
    nr_text=$(nr_refused)
    if [ -z "$nr_text" ]; then nr_text=$(nr_line 'dpkg: error'); fi
    if [ -z "$nr_text" ]; then
        # While a mirror is down, its packages are missing in the index.
        nr_text=$(nr_line "$nr_unknown" 'nothing provides' 'Problem( [0-9]+)?: ' \
            '^(E:|Error: *[^ ])' '[^[:space:]].*')
        nr_text=${nr_mirror:+$nr_mirror; then }${nr_text#E: }
    fi
    nr_text=${nr_text:-$nr_manager failed with exit status $nr_rc}
    printf '%s\n' "$nr_text" | sed -E 's/^[[:space:]-]*((E|W|Error|Problem( [0-9]+)?): )?//; s/[[:space:]]+/ /g'
}

# nr_packages MANAGER WAIT NAME...: install all packages, or as many as possible, and name the rest.
nr_packages() {
    nr_manager=$1 nr_wait=$2 nr_mirror=
    nr_uptime
    nr_until=$((nr_now + $2))
    shift 2
    if [ "$nr_manager" = apt-get ]; then
        # A mirror that is down only causes warnings here: the old index may suffice.
        nr_try nr_apt update || :
        nr_mirror=$(nr_refused)
        if [ -z "$nr_mirror" ]; then nr_mirror=$(nr_line '^E: '); fi
    fi
    if nr_install "$@"; then return; fi
    nr_why=$(nr_cause) nr_missing=$*
    if [ $# -gt 1 ] &&
        { [ -z "$(nr_line "$nr_network")" ] || [ -n "$(nr_line "$nr_unknown")" ]; }; then
        # A missing package, or a mirror that is skipped, must not prevent further packages.
        nr_why='' nr_missing=''
        for nr_name in "$@"; do
            if ! nr_install "$nr_name"; then
                nr_missing="$nr_missing $nr_name"
                nr_why=${nr_why:-$(nr_cause)}
            fi
        done
        if [ -z "$nr_missing" ]; then return; fi
    fi
    if printf '%s\n' "$nr_why" | grep -Eq -e "$nr_unknown"; then
        case " $nr_missing $nr_manager" in
        *' pdsh '*zypper) nr_why="$nr_why (pdsh is in PackageHub: enable it)" ;;
        *' pdsh '*dnf | *' pdsh '*yum) nr_why="$nr_why (pdsh is in EPEL: enable it)" ;;
        esac
    fi
    nr_fail "not installed: ${nr_missing# }: $nr_why"
}

# --- Packages with missing or broken programs.

# nr_owner PATH: the package with the file, by the package manager's records. Where /bin is a link to
# /usr/bin, dpkg may have either name.
nr_owner() {
    if command -v dpkg-query >/dev/null 2>&1; then
        for nr_name in "$1" "${1#/usr}" "/usr$1"; do
            nr_out=$(dpkg-query -S "$nr_name" 2>/dev/null | grep -v '^diversion ' | head -n 1)
            if [ -n "$nr_out" ]; then
                nr_out=${nr_out%%: *}
                nr_out=${nr_out%%,*}
                printf '%s' "${nr_out%%:*}"
                return
            fi
        done
    else
        rpm -qf --qf '%{NAME}\n' -- "$1" 2>/dev/null | grep -v ' ' | head -n 1
    fi
}

# nr_of_library SONAME: the package with the library.
nr_of_library() {
    if command -v dpkg-query >/dev/null 2>&1; then
        nr_owner "*/$1"
    else
        rpm -q --qf '%{NAME}\n' --whatprovides "$1()(64bit)" 2>/dev/null | grep -v ' ' | head -n 1
    fi
}

# nr_lacks PATH: why the program does not start, in the loader's words; nothing when it starts.
nr_lacks() {
    for nr_loader in /lib64/ld-linux-x86-64.so.2 /lib/ld-linux-aarch64.so.1 /lib64/ld64.so.2 \
        /lib/ld-linux-riscv64-lp64d.so.1; do
        [ -x "$nr_loader" ] || continue
        nr_out=$(nr_answer "$nr_loader" --list "$1") || case $nr_out in
        *'loading shared libraries: '"$1:"*) ;;
        *' not found (required by '*)
            nr_out=${nr_out%% not found \(required by *}
            printf '%s' "${nr_out#*: } not found"
            ;;
        *'loading shared libraries: '*) printf '%s' "${nr_out##*loading shared libraries: }" ;;
        esac
        return 0
    done
}

# nr_reinstall NAME: restore the package's files. A version that no mirror has any more is replaced by
# an available version.
nr_reinstall() {
    case $nr_manager in
    apt-get) nr_try nr_apt --no-install-recommends --no-remove --reinstall install -- "$1" ;;
    zypper) nr_try nr_zypper install --no-recommends --force -- "$1" ;;
    *)
        nr_try nr_dnf reinstall -- "$1" && return
        nr_first=$nr_out
        nr_try nr_dnf upgrade -- "$1" || return
        nr_out=$nr_first
        ;;
    esac
}

# nr_again MANAGER WAIT NAME PATH...: reinstall packages until each program exists and starts. PATH
# '-': reinstall the package in any case. MANAGER '': the installed manager.
nr_again() {
    nr_manager=$1 nr_wait=$2 nr_done=' '
    nr_uptime
    nr_until=$((nr_now + $2))
    shift 2
    for nr_name in apt-get zypper dnf yum; do
        if [ -z "$nr_manager" ] && command -v "$nr_name" >/dev/null 2>&1; then nr_manager=$nr_name; fi
    done
    [ -n "$nr_manager" ] || nr_fail "no package manager that installs $1 again"
    if [ "$nr_manager" = apt-get ]; then nr_try nr_apt update || :; fi
    while [ $# -gt 1 ]; do
        nr_package=$1 nr_program=$2
        shift 2
        nr_count=0
        # A program can lack several libraries; the loader names one at a time.
        while [ "$nr_count" -lt 6 ]; do
            nr_count=$((nr_count + 1)) nr_library=''
            if [ -s "$nr_program" ]; then
                nr_library=$(nr_lacks "$nr_program")
                if [ -z "$nr_library" ] && [ "$nr_count" -gt 1 ]; then break; fi
                nr_file=${nr_library%%:*} nr_own=''
                if [ -n "$nr_library" ]; then nr_own=$(nr_of_library "${nr_file##*/}"); fi
            elif [ "$nr_program" = - ]; then
                nr_own=$nr_package
            else
                nr_own=$(nr_owner "$nr_program")
            fi
            nr_own=${nr_own:-$nr_package}
            case $nr_done in *" $nr_own "*) break ;; esac
            nr_done="$nr_done$nr_own "
            if ! nr_reinstall "$nr_own"; then nr_fail "not installed again: $nr_own: $(nr_cause)"; fi
            nr_words=$(nr_line 'Reinstallation of .* is not possible.*' \
                'Installed package .* not available' 'is not available in your repositories')
        done
        if [ "$nr_program" = - ]; then continue; fi
        if [ ! -s "$nr_program" ]; then
            nr_fail "$nr_program is still gone: ${nr_words:-$nr_own was installed again and has not brought it}"
        fi
        nr_library=$(nr_lacks "$nr_program")
        if [ -n "$nr_library" ]; then nr_fail "$nr_program still does not start: $nr_library"; fi
    done
}
