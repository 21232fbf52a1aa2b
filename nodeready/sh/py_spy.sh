# The program /usr/local/bin/py-spy: rows for the program and for each directory on the way to it, also
# on the way to a link's target: who can change them. The program's row is the last. The script runs the
# program only where root alone can change it, and where the digest does not reveal its version. A link
# to a link counts as changeable by others: the probe does not follow the links between.
nr_line=
{ read -r nr_line </proc/sys/kernel/arch; } 2>/dev/null
printf 'machine=%s\n' "${nr_line:-$(uname -m)}"
if [ -e @PY_SPY@ ] && [ ! -f @PY_SPY@ ]; then printf 'no_file=@PY_SPY@\n'; fi
nr_file=@PY_SPY@ nr_alone=1
if [ -L @PY_SPY@ ]; then
    nr_file=$(readlink -f @PY_SPY@)
    if [ "$nr_file" != "$(readlink @PY_SPY@)" ]; then
        nr_alone=
        printf 'hops=1\n'
    fi
    case $nr_file in *[!A-Za-z0-9/._+-]*) nr_file= ;; esac
    printf 'link=%s\n' "$nr_file"
fi
if [ -f "$nr_file" ]; then
    # The mode allows root to execute it, and the mount forbids it.
    if [ ! -x "$nr_file" ]; then printf 'noexec=1\n'; fi
    set -- @NOTE@ @NOTE_DIRECTORY@ /
    for nr_dir in @PY_SPY@ "$nr_file"; do
        while nr_dir=${nr_dir%/*}; [ -n "$nr_dir" ]; do set -- "$@" "$nr_dir"; done
    done
    nr_out=$(stat -Lc '%i %s %.9Y %.9Z at=%u %g %a %n' -- @RUN@ "$@" "$nr_file" 2>/dev/null)
    nr_known='' nr_sum=''
    IFS='
'
    for nr_row in $nr_out; do
        nr_id=${nr_row%% at=*}
        case ${nr_row#* at=} in
        *' @RUN@') nr_rank=${nr_row#* at=}; continue ;;
        '0 0 644 @NOTE@') nr_known=$nr_known+ ;;
        '0 0 755 @NOTE_DIRECTORY@') nr_known=$nr_known+ ;;
        *' @NOTE@'|*' @NOTE_DIRECTORY@') ;;
        *) printf 'at=%s\n' "${nr_row#* at=}" ;;
        esac
        case ${nr_row#* at=} in '0 '*[0145]' /'*) ;; *) nr_alone= ;; esac
    done
    unset IFS
    case ${nr_row#* at=} in '0 '*[0145][0145]' /'*) ;; *) nr_alone= ;; esac
    if [ "$nr_known" = ++ ]; then
        read -r nr_sum nr_noted <@NOTE@
        if [ "$nr_noted" != "$nr_id" ]; then nr_sum=; fi
    fi
    if [ -z "$nr_sum" ]; then nr_sum=$(sha256sum <"$nr_file"); nr_sum=${nr_sum%% *}; fi
    printf 'sha256=%s\n' "$nr_sum"
    case $nr_sum in
    @DIGESTS@) ;;
    *)
        if [ -n "$nr_alone" ]; then
            nr_say version "$(timeout -k 1 2 "$nr_file" --version 2>/dev/null)"
        fi
        ;;
    esac
fi
