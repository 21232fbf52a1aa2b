# The hosts of the policy that a foreign Host or Match line names: the words of Host lines, and of the
# host and originalhost of Match lines. A pattern is replaced by the first of the policy's samples that
# it matches, else by the first name in ssh_known_hosts that it and the policy match, else by the
# pattern's own sample.
# shellcheck disable=SC2043,SC2086,SC2194,SC2254 # one word per name; @SAMPLES@ are several; patterns
nr_meant() {
    nr_is=1
    @TESTS@
    return $nr_is
}
nr_stands_for() {
    for nr_host in @SAMPLES@; do
        case $nr_host in $1) return ;; esac
    done
    nr_known=${nr_known:-$(sed -n '/^@BEGIN@$/,/^@END@$/s/[ ,].*//p' @KNOWN_HOSTS@)}
    for nr_host in $nr_known; do
        case $nr_host in $1) if nr_meant "$nr_host"; then return; fi ;; esac
    done
    nr_host=$1
    while :; do
        case $nr_host in
        *'*'*) nr_host=${nr_host%%'*'*}x${nr_host#*'*'} ;;
        *'?'*) nr_host=${nr_host%%'?'*}0${nr_host#*'?'} ;;
        *) return ;;
        esac
    done
}
nr_named='' nr_known='' nr_left=@MAX_NAMED@ nr_kind=''
set -f
nr_hosts=
IFS='
'
for nr_line in $nr_conf; do
    nr_line=${nr_line#*:[0-9]*:}
    nr_line=${nr_line#"${nr_line%%[![:space:]]*}"}
    case $nr_line in
    [Hh][Oo][Ss][Tt][[:space:]=]* | [Mm][Aa][Tt][Cc][Hh][[:space:]=]*) nr_hosts="$nr_hosts$nr_line
" ;;
    esac
done
IFS=', "
'
for nr_word in $nr_hosts; do
    case $nr_word in
    # host, host=, originalhost; then match, match=, exec, user, localuser, localnetwork, tagged; in any
    # case.
    [Hh][Oo][Ss][Tt] | [Hh][Oo][Ss][Tt]= | [Oo][Rr][Ii][Gg][Ii][Nn][Aa][Ll][Hh][Oo][Ss][Tt]) nr_kind=host && continue ;;
    [Mm][Aa][Tt][Cc][Hh] | [Mm][Aa][Tt][Cc][Hh]= | [Ee][Xx][Ee][Cc] | \
    [Uu][Ss][Ee][Rr] | [Ll][Oo][Cc][Aa][Ll][Uu][Ss][Ee][Rr] | [Ll][Oo][Cc][Aa][Ll][Nn][Ee][Tt][Ww][Oo][Rr][Kk] | [Tt][Aa][Gg][Gg][Ee][Dd]) nr_kind='' && continue ;;
    [Hh][Oo][Ss][Tt]=*) nr_kind=host nr_word=${nr_word#*=} ;;
    esac
    [ -n "$nr_kind" ] || continue
    case $nr_word in
    '' | '*' | -* | *[!A-Za-z0-9._*?:-]*) continue ;;
    *[*?]*) nr_stands_for "$nr_word" ;;
    *) nr_host=$nr_word ;;
    esac
    case " @SAMPLES@ $nr_named " in *" $nr_host "*) continue ;; esac
    if [ -n "$nr_host" ] && [ "$nr_left" -gt 0 ] && nr_meant "$nr_host"; then
        nr_named="$nr_named $nr_host" nr_left=$((nr_left - 1))
    fi
done
unset IFS
set +f
