# shellcheck disable=SC2209 # a word
# The state comes first. Without the last line, the file was not read to its end.
if [ ! -d "$1" ]; then printf 'none\n\nnodeready: end'; exit; fi
nr_state=
if [ ! -w "$1" ]; then nr_state=readonly; fi
if [ -f "$1/.pdshrc" ] && [ -r "$1/.pdshrc" ]; then
    echo "file $nr_state"
    head -c "$2" "$1/.pdshrc" || exit
elif [ -e "$1/.pdshrc" ] || [ -L "$1/.pdshrc" ]; then
    echo "nofile unreadable"
else
    echo "nofile $nr_state"
fi
printf '\nnodeready: end'
