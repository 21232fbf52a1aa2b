# Take back what nodeready has changed on this node, by the list that nr_begin keeps (change.sh).
# Each function nr_undo_KIND has one line of it: nr_of (the step), nr_thing, nr_state. It prints what
# is to do, and does it unless nr_only_look is set. Without a word there is nothing to do. Status 3:
# a person has to do it.
# shellcheck disable=SC2030,SC2031 # a subshell for each line

# nr_does VERB TEXT: print it; whether to do it, too.
nr_does() {
    printf '%s %s %s\n' "$nr_of" "$1" "$2"
    [ -z "$nr_only_look" ]
}

# nr_block_of FILE: whether it has one block of nodeready; its first and last line.
nr_block_of() {
    nr_first=$(grep -n '^# >>> nodeready: ' -- "$1" | cut -d: -f1)
    nr_last=$(grep -n '^# <<< nodeready <<<' -- "$1" | cut -d: -f1)
    [ "$nr_first" -lt "$nr_last" ] # an error with none, or with several
} 2>/dev/null

# nr_unblock PATH: remove nodeready's block; a file that has nothing else is removed.
nr_unblock() {
    nr_walk "$1" 0 || return 0
    nr_block_of "./$nr_name" || return 0
    nr_rest_of_file=$(sed "${nr_first},${nr_last}d" <"./$nr_name" | base64) || nr_fail "$1: cannot be read"
    if [ -z "$nr_rest_of_file" ]; then nr_remove "$1"; else nr_write "$1" 0644 "$nr_rest_of_file" '*'; fi
}

# nr_differs NEW: the lines that would go and come, for a person who looks.
nr_differs() {
    [ -n "$nr_only_look" ] || return 0
    printf '%s\n' "$nr_of diff --- $nr_thing"
    diff -U 0 "$nr_target" "$1" 2>/dev/null | tail -n +3 | head -n 400 | sed "s|^|$nr_of diff |"
}

nr_undo_file() {
    nr_target=/dev/null nr_now=- nr_before=-
    if nr_walk "$nr_thing" 0 && [ -f "./$nr_name" ]; then
        nr_target=./$nr_name
        nr_now=$(sha256sum <"$nr_target")
        nr_now=${nr_now%% *}
    fi
    case $nr_state in
    - | =) ;;
    *)
        nr_before=$(sha256sum <"$nr_kept/$nr_state") || nr_fail "$nr_kept/$nr_state: is gone"
        nr_before=${nr_before%% *}
        ;;
    esac
    if [ "$nr_now" = "$nr_before" ]; then return; fi
    if [ "$nr_state" != = ] && grep -q -e " wrote $nr_thing $nr_now\$" -- "$nr_kept/list"; then
        if [ "$nr_before" = - ]; then
            nr_differs /dev/null
            if nr_does remove "$nr_thing"; then nr_remove "$nr_thing"; fi
            return
        fi
        nr_differs "$nr_kept/$nr_state"
        if nr_does restore "$nr_thing"; then
            nr_tmp=$(mktemp ./.nodeready.XXXXXX) || nr_fail "$nr_thing: cannot be written"
            nr_out=$({ cp -a -- "$nr_kept/$nr_state" "$nr_tmp" && sync -- "$nr_tmp" && mv -f -- "$nr_tmp" "./$nr_name"; } 2>&1) ||
                nr_fail "$(nr_reason "$nr_thing" "$nr_out")"
            nr_tmp=
        fi
    elif nr_block_of "$nr_target"; then
        if nr_does block "$nr_thing"; then nr_unblock "$nr_thing"; fi
    elif [ "$nr_state" != = ]; then
        nr_does changed "$nr_thing" || :
        return 3
    fi
}

# A file with nodeready's name that no line of the list has: of an earlier release.
nr_undo_own() {
    nr_does remove "$nr_thing" || return 0
    nr_remove "$nr_thing"
    case $nr_thing in /etc/systemd/*) systemctl daemon-reload >/dev/null 2>&1 || : ;; esac
}

# THING is USER/NAME, in the home directory of that user.
nr_undo_user() {
    nr_user=${nr_thing%%/*}
    nr_home=$({ getent passwd -- "$nr_user" || grep -m 1 -e "^$nr_user:" /etc/passwd; } 2>/dev/null | cut -d: -f6)
    if [ ! -f "$nr_home/${nr_thing#*/}" ]; then return; fi
    if nr_does block "$nr_home/${nr_thing#*/}"; then
        nr_as "$nr_user" "nr_unblock \"\$NR_HOME\"/${nr_thing#*/}"
        nr_as_done
    fi
}

nr_undo_mode() {
    nr_now=$(stat -Lc '%u:%g %a' -- "$nr_thing" 2>/dev/null) || return 0
    if [ "$nr_now" = "$nr_state" ] || ! nr_does mode "$nr_thing: owner ${nr_state% *}, mode ${nr_state#* }"; then return; fi
    nr_walk "$nr_thing" 0 || return 0
    nr_do '' chown -- "${nr_state% *}" "./$nr_name"
    nr_do '' chmod -- "${nr_state#* }" "./$nr_name"
}

nr_undo_dir() {
    if [ ! -d "$nr_thing" ] || ! nr_does rmdir "$nr_thing"; then return 0; fi
    if nr_walk "${nr_thing%/*}/." 0; then rmdir -- "./${nr_thing##*/}" 2>/dev/null || :; fi
}

# The value of the files that are left; without one, the value before nodeready.
nr_undo_sysctl() {
    nr_does sysctl "$nr_thing: as the remaining files set it, else $nr_state" || return 0
    nr_value=/proc/sys/$(printf %s "$nr_thing" | tr . /)
    nr_out=$( { printf '%s\n' "$nr_state" >"$nr_value"; } 2>&1) || nr_fail "$nr_thing: the kernel refuses '$nr_state'"
    for nr_x in /usr/lib/systemd/systemd-sysctl /lib/systemd/systemd-sysctl; do
        if [ -x "$nr_x" ]; then
            "$nr_x" "--prefix=${nr_value#/proc/sys}" >/dev/null 2>&1 || :
            return
        fi
    done
    sysctl --system --pattern "^$nr_thing\$" >/dev/null 2>&1 || :
}

nr_undo_unit() {
    nr_does unit "$nr_thing: $nr_state" || return 0
    case $nr_state in masked*) return ;; esac
    nr_do '' systemctl unmask "$nr_thing"
    case $nr_state in enabled*) nr_do '' systemctl enable "$nr_thing" ;; esac
    case $nr_state in *' active') nr_do '' systemctl start "$nr_thing" ;; esac
}

nr_undo_sebool() {
    if nr_does run "setsebool -P $nr_thing $nr_state"; then nr_do '' setsebool -P "$nr_thing" "$nr_state"; fi
}

nr_undo_grub() {
    case $nr_state in --args) nr_x=--remove-args=$nr_thing ;; *) nr_x=--args=$nr_thing ;; esac
    if nr_does run "grubby --update-kernel=ALL $nr_x"; then nr_do '' grubby --update-kernel=ALL "$nr_x"; fi
}

nr_undo_run() {
    # shellcheck disable=SC2086 # words
    if nr_does run "$nr_thing $nr_state"; then nr_do '' "$nr_thing" $nr_state; fi
}

# nr_undo_lines: the list, latest line first; then the files of earlier releases, which no line has.
nr_undo_lines() {
    sed '1!G;h;$!d' "$nr_kept/list" 2>/dev/null
    printf '%s\n' "$nr_old" | while read -r nr_of nr_kind nr_thing nr_state; do
        for nr_x in $nr_thing; do
            if [ -f "$nr_x" ] && ! grep -qF -e " file $nr_x " -- "$nr_kept/list" 2>/dev/null; then
                printf '%s\n' "$nr_of $nr_kind $nr_x $nr_state"
            fi
        done
    done
}

# nr_undo ONLY_LOOK SUBJECT,... OLD: take back the changes of these subjects, or only print them. What
# fails stays in the list, and is printed: STEP failed TEXT.
# OLD: lines of the list for files of earlier releases, with a pattern as THING
nr_undo() {
    [ "$(id -u)" = 0 ] || nr_fail 'not root: add --sudo, or log in as root (-u root)'
    nr_only_look=$1 nr_chosen=,$2, nr_old=$3
    for nr_kind in user file own unit mode dir run sebool grub sysctl; do
        nr_undo_lines | grep -e "^[^ ]* $nr_kind " | while read -r nr_of nr_kind nr_thing nr_state; do
            case $nr_chosen in *",${nr_of%%.*},"*) nr_undo_line ;; esac
        done
    done
    if [ -z "$nr_only_look" ] && [ ! -s "$nr_kept/list" ]; then
        rm -rf -- "$nr_kept"
        rmdir -- "${nr_kept%/*}" 2>/dev/null || :
    fi
}

# nr_undo_line: one line; forget it when it is done.
nr_undo_line() {
    nr_printed=$("nr_undo_$nr_kind" </dev/null 2>&1)
    nr_status=$?
    case $nr_status:$nr_printed in
    [03]:) ;;
    [03]:*) printf '%s\n' "$nr_printed" ;;
    *) printf '%s\n' "$nr_of failed $nr_thing: ${nr_printed##*nodeready: }" ;;
    esac
    if [ -n "$nr_only_look" ] || [ "$nr_status" != 0 ] || [ ! -e "$nr_kept/list" ]; then return; fi
    grep -vF -e " $nr_kind $nr_thing " -e " wrote $nr_thing " -- "$nr_kept/list" >"$nr_kept/new"
    if [ $? -gt 1 ] || ! mv -f -- "$nr_kept/new" "$nr_kept/list"; then nr_fail "no space left on $nr_kept"; fi
    case $nr_kind:$nr_state in file:[0-9]*) rm -f -- "$nr_kept/$nr_state" ;; esac
}
