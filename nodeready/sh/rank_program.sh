# The file that starts a rank. nr_rank: its owner, group and mode, where py_spy.sh has read them.
# shellcheck disable=SC2086 # three words
if [ -f @RUN@ ]; then
    nr_sum=$(sha256sum <@RUN@)
    set -- ${nr_rank:-$(stat -Lc '%u %g %a' @RUN@)}
    printf 'run=%s %s %s\n' "$1" "$3" "${nr_sum%% *}"
elif [ -e @RUN@ ]; then printf 'no_file=@RUN@\n'
fi
