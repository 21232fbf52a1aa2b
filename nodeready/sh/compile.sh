# nr_compile PYTHON BUNDLE COMPILED NOTE SHA256: compile BUNDLE for this Python into COMPILED, completely
# or not at all. NOTE describes the source and is written last: without NOTE, COMPILED is made again.
# A BUNDLE with another SHA256 is never run.
nr_compile() {
    nr_walk "$3" 0 || nr_fail "$3: there is no such directory"
    [ "$nr_name" != . ] || nr_fail "$3: is a directory"
    [ "$nr_ground" = private ] || nr_fail "$nr_at: others can write there"
    nr_out=$(sha256sum <"$2") || nr_fail "$2: cannot be read"
    [ "${nr_out%% *}" = "$5" ] || nr_fail "$2: is not what was put there; run again"
    # Files of a killed run.
    rm -f -- ./.nodeready.??????
    nr_out=$(nr_answer mktemp ./.nodeready.XXXXXX) || nr_fail "$(nr_reason "$3" "$nr_out")"
    nr_tmp=$nr_out
    nr_code='import sys; sys.path.insert(0, sys.argv[1]); from nodeready.agent.gate import main; main.compile_bundle(*sys.argv[1:])'
    nr_note=$(nr_answer "$1" -I -S -B -c "$nr_code" "$2" "$nr_tmp" "$3") || nr_fail "$(nr_reason "$3" "$nr_note")"
    nr_out=$("$1" -I -S -B "$nr_tmp" --version 2>&1) || nr_fail "$3: it does not run"
    chmod 0644 "$nr_tmp" || nr_fail "$3: cannot set the mode"
    nr_out=$(sync -- "$nr_tmp" 2>&1) || nr_fail "$(nr_reason "$3" "$nr_out")"
    nr_out=$(rm -f -- "$4" && mv -f -- "$nr_tmp" "./$nr_name" 2>&1) || nr_fail "$(nr_reason "$3" "$nr_out")"
    nr_tmp=
    if [ -e /sys/fs/selinux/enforce ]; then restorecon -- "$3" 2>/dev/null; fi
    nr_write "$4" 0644 "$(printf '%s\n' "$nr_note" | base64)" '*'
}
