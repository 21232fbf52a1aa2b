# ssh itself is asked, as an ordinary user. A user without ~/.ssh/config has the system's options, as
# far as the modes of the files allow. root's file overrides the system's: where root has one, root asks
# as well. Besides the samples, ssh is asked about the hosts of the policy that a foreign Host or Match
# line names: their options can differ.
# shellcheck disable=SC2086 # a command's words
@VERSION@
@NAMED@
nr_options() {
    # Only for a message is ssh asked again, with one more process.
    nr_rc=0
    nr_line=$("$@" </dev/null 2>/dev/null 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-) && return
    nr_line=$(nr_answer "$@" </dev/null 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-) || nr_rc=$?
}
nr_ask() {
    printf 'ask=%s %s\n' "$1" "$2"
    if [ "$1" = own ]; then
        nr_options ssh -GT -- "$2"
    else
        nr_line='setpriv: none'
        if [ -n "$nr_user" ]; then nr_options $nr_user ssh -GT -- "$2"; fi
        # Where root may not become another user.
        case $nr_line in
        'setpriv: failed to execute'*) ;;
        'setpriv: '*)
            nr_user=
            nr_options ssh -GT -F @MAIN@ -- "$2"
            ;;
        esac
    fi
    nr_bar_lines "$nr_line"
    printf 'rc=%s\n' "$nr_rc"
}
nr_find_setpriv
nr_user=
if [ "$nr_me" = 0 ] && [ -n "$nr_setpriv" ]; then
    nr_user="$nr_setpriv --reuid=65534 --regid=65534 --clear-groups --"
fi
nr_as=own
if [ -n "$nr_user$nr_own" ]; then nr_as=system; fi
for nr_host in @HOSTS@ $nr_named; do nr_ask $nr_as "$nr_host"; done
if [ -n "$nr_own" ]; then
    printf 'own=%s\n' "$nr_own"
    for nr_host in @HOSTS@ $nr_named; do nr_ask own "$nr_host"; done
fi
