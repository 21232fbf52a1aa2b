# A node's RDMA devices, and the PCI functions of adapters for RDMA alone: classes 0x0207 (InfiniBand) and
# 0x0208 (fabric), Amazon's EFA (0xefa0 and up), HPE's Cassini (0x0501). Such a function without an RDMA
# device has lost its driver, unless a virtual machine uses it (vfio-pci).
#
# A RoCE port has 256 GIDs, two for each address, and the filled GIDs come first: 16 hold the link-local
# and seven further addresses. No check needs the GIDs of an InfiniBand port.
for nr_dir in /sys/bus/pci/devices/*; do
    nr_class='' nr_vendor='' nr_device=''
    { read -r nr_class <"$nr_dir/class"; } 2>/dev/null
    case $nr_class in
    0x020[78]*) ;;
    0x0200*)
        { read -r nr_vendor <"$nr_dir/vendor" && read -r nr_device <"$nr_dir/device"; } \
            2>/dev/null
        case $nr_vendor:$nr_device in 0x1d0f:0xefa*|0x17db:0x0501) ;; *) continue ;; esac
        ;;
    *) continue ;;
    esac
    nr_name=${nr_dir##*/}
    if [ -e "$nr_dir/physfn" ] || [ -e "/sys/bus/pci/drivers/vfio-pci/$nr_name" ]; then
        continue
    fi
    if [ -e "$nr_dir/driver" ]; then nr_device=bound; else nr_device=unbound; fi
    printf 'adapter=%s %s\n' "$nr_name" "$nr_device"
done
set --
if [ -d @IB@ ]; then
    set -- @DEVICE_FILES@ \
        @PORT_FILES@ @VERBS@/*/ibdev
    for nr_dir in @IB@/*; do
        if [ -e "$nr_dir/device/physfn" ]; then printf 'virtual=%s\n' "${nr_dir##*/}"; fi
    done
    for nr_dir in @IB@/*/ports/[0-9]*; do
        nr_line=
        { read -r nr_line <"$nr_dir/link_layer"; } 2>/dev/null
        if [ "$nr_line" = Ethernet ]; then
            set -- "$@" "$nr_dir"/gids/[0-9] "$nr_dir"/gids/1[0-5] \
                "$nr_dir"/gid_attrs/types/[0-9] "$nr_dir"/gid_attrs/types/1[0-5] "$nr_dir"/gid_attrs/ndevs/0
        fi
    done
fi
if [ -d @CXI@ ]; then
    set -- "$@" @CXI_FILES@
fi
if [ $# != 0 ]; then nr_lines raw "$@"; fi
if [ -d @DEV@ ]; then
    find @DEV@ -name 'uverbs*' ! -perm -006 '(' ! -perm -060 -o -group 0 ')' 2>/dev/null
fi
