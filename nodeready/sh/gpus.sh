# The GPUs on the PCI bus, the files of their drivers, and how adapters reach them.
#
# 0x15b3 with 0x2100 is the function of a ConnectX through which it reads a GPU behind its own switch,
# without the processor (mlx5 Data Direct; the "CX DMA function" of rdma-core's rdma_topo).
set --
nr_gpus='' nr_direct=''
for nr_device in /sys/bus/pci/devices/*; do
    nr_vendor=
    { read -r nr_vendor <"$nr_device/vendor"; } 2>/dev/null
    case $nr_vendor in
    0x10de | 0x1002) ;;
    0x15b3)
        { read -r nr_vendor <"$nr_device/device"; } 2>/dev/null
        case $nr_vendor in 0x2100) nr_direct="$nr_direct $nr_device" ;; esac
        continue ;;
    *) continue ;;
    esac
    # A virtual function of a card of this host belongs to a virtual machine.
    if [ -e "$nr_device/physfn" ]; then continue; fi
    nr_class=
    { read -r nr_class <"$nr_device/class"; } 2>/dev/null
    case $nr_class in
    # The counters of the port above the GPU, too: it is at the far end of the link.
    0x03* | 0x12* | 0x0680*)
        set -- "$@" "$nr_device/vendor" "$nr_device/class" "$nr_device/device" "$nr_device/uevent" \
            "$nr_device/numa_node" "$nr_device/current_link_width" "$nr_device/max_link_width" \
            "$nr_device/current_link_speed" "$nr_device/aer_dev_fatal" \
            "$nr_device/aer_dev_nonfatal" "$nr_device/../aer_dev_fatal" \
            "$nr_device/../aer_dev_nonfatal"
        ;;
    esac
    case $nr_class in 0x03* | 0x12*) nr_gpus="$nr_gpus $nr_device" ;; esac
done
if [ -n "$nr_gpus" ]; then
    set -- "$@" /proc/sys/kernel/osrelease /sys/class/infiniband/*/ports/*/rate \
        /sys/class/infiniband/*/device/iommu_group/type /sys/class/infiniband/*/device/uevent \
        /sys/module/nvidia_peermem/initstate /sys/module/nv_peer_mem/initstate \
        /sys/module/gdrdrv/initstate
fi
if [ -e /proc/driver/nvidia/version ]; then set -- "$@" /proc/driver/nvidia/version; fi
if [ -e /sys/module/nvidia/version ]; then set -- "$@" /sys/module/nvidia/version; fi
# Counters of errors that are 0 are left out.
if [ $# -gt 0 ]; then grep -asHv '[A-Za-z] 0$' "$@"; fi
set --
for nr_file in /dev/nvidia* /dev/kfd /dev/dri/renderD*; do
    if [ -c "$nr_file" ]; then set -- "$@" "$nr_file"; fi
done
if [ $# -gt 0 ]; then ls -ln -- "$@" 2>/dev/null; fi

# The peers: below a root port, each second bridge of a path is the downstream port of a switch.
if [ -n "$nr_gpus" ]; then (
    nr_ports=''
    for nr_device in gpu $nr_gpus direct $nr_direct rdma /sys/class/infiniband/*/device; do
        case $nr_device in /*) ;; *) nr_kind=$nr_device; continue ;; esac
        cd -P "$nr_device" 2>/dev/null || continue
        nr_device=${nr_device%/device}
        printf 'peer=%s %s %s\n' "$nr_kind" "${nr_device##*/}" "$PWD"
        nr_at=${PWD%/*}
        while case $nr_at in */pci*/*/*/*) ;; *) false ;; esac; do
            case "$nr_ports " in
            *" $nr_at/config "*) ;;
            *) nr_ports="$nr_ports $nr_at/config"; printf 'port=%s\n' "${nr_at##*/}" ;;
            esac
            nr_at=${nr_at%/*/*}
        done
    done
    # shellcheck disable=SC2086 # one word per file
    if [ -n "$nr_ports" ]; then exec od -Ax -tx1 $nr_ports 2>/dev/null; fi
); fi
:
