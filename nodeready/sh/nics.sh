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
    # The names need no quotes: the kernel allows no white space and no slash in them.
    nr_files="$nr_files $nr_dir/address $nr_dir/carrier $nr_dir/carrier_changes $nr_dir/duplex $nr_dir/flags
        $nr_dir/mtu $nr_dir/operstate $nr_dir/phys_port_name $nr_dir/speed $nr_dir/type
        $nr_dir/uevent $nr_dir/statistics/rx_errors $nr_dir/statistics/tx_errors
        $nr_dir/statistics/rx_crc_errors $nr_dir/statistics/rx_dropped
        $nr_dir/statistics/tx_dropped $nr_dir/device/uevent $nr_dir/device/numa_node
        $nr_dir/device/infiniband/*/fw_ver $nr_dir/bonding/mode $nr_dir/bonding/mii_status
        $nr_dir/bonding/slaves $nr_dir/bonding/active_slave $nr_dir/bonding/ad_aggregator
        $nr_dir/bonding/ad_partner_mac $nr_dir/bonding_slave/mii_status
        $nr_dir/bonding_slave/ad_aggregator_id $nr_dir/bonding_slave/link_failure_count"
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
