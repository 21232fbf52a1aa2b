# The network interfaces, and what is on top of them. The node's ends of the interfaces of containers and
# virtual machines are counted, by the names that Docker and CNI plugins give: there can be hundreds, and
# no check needs them.
# shellcheck disable=SC2086 # one word per file
nr_ends=0 nr_files=
for nr_dir in @NET@/*; do
    nr_name=${nr_dir##*/}
    case $nr_name in
    @NAMED@) ;;
    veth[0-9a-f]??????*|cali???????????|lxc[0-9a-f]????*|eni[0-9a-f]??????????|gke[0-9a-f]??????????|azv[0-9a-f]??????????|tap*|vnet[0-9]*) nr_ends=$((nr_ends + 1)); continue ;;
    esac
    if [ ! -e "$nr_dir/ifindex" ]; then continue; fi
    nr_files="$nr_files @FILES@"
    for nr_upper in "$nr_dir"/upper_*; do
        if [ ! -e "$nr_upper" ]; then continue; fi
        printf 'upper=%s %s\n' "$nr_name" "${nr_upper##*/upper_}"
        if [ "$nr_upper" -ef "$nr_dir/master" ]; then
            printf 'master=%s %s\n' "$nr_name" "${nr_upper##*/upper_}"
        fi
    done
done
printf 'ends=%s\n' "$nr_ends"
nr_lines raw $nr_files
