# The kernel arguments of a node, and the files that set them. Only the hardware is read on every node: a
# node without an AMD Instinct starts no process for the rest, unless the policy has arguments.
# shellcheck disable=SC2043 # @GRUB_CFG@ are several
nr_amd=@NR_AMD@
for nr_dir in /sys/bus/pci/devices/*; do
    nr_line=
    { read -r nr_line <"$nr_dir/vendor"; } 2>/dev/null
    if [ "$nr_line" = @VENDOR@ ]; then
        nr_value device "$nr_dir/device"
        nr_amd=1
    fi
done
if [ -n "$nr_amd" ]; then
    nr_value cpus /sys/devices/system/cpu/online
    nr_value live /proc/cmdline
    while read -r nr_line; do
        case $nr_line in vendor_id*) printf 'cpu=%s\n' "${nr_line##* }"; break ;; esac
    done </proc/cpuinfo
    for nr_file in @GRUB_CFG@ @ENTRIES@; do
        if [ -e "$nr_file" ] && [ ! -r "$nr_file" ]; then
            printf 'unreadable=%s\n' "$nr_file"
        fi
        for nr_own in @DEFAULT_GRUB@ @GRUB_D@/*nodeready*.cfg; do
            if [ -f "$nr_file" ] && [ "$nr_file" -nt "$nr_own" ]; then
                printf 'newer=%s %s\n' "$nr_own" "$nr_file"
            fi
        done
    done
    for nr_file in @GRUB_D@/*.cfg; do
        if [ -e "$nr_file" ]; then printf 'dropin=%s\n' "$nr_file"; fi
    done
    nr_have update-grub grub-mkconfig grubby grub2-mkconfig
    grep -asHnE '^[[:space:]]*(export[[:space:]]+)?GRUB_CMDLINE_LINUX|^[[:space:]]*(set )?[A-Za-z_]+=|^(options|title|default)[[:space:]]|^[[:space:]]*linux(16|efi)?[[:space:]]|^[[:space:]]*(menuentry|submenu|function)[[:space:]]|^[[:space:]]*}|^[[:space:]]*blscfg|^### (BEGIN|END) ' /etc/os-release @DEFAULT_GRUB@ @GRUB_D@/*.cfg \
        @GRUB_CFG@ @ENTRIES@/*.conf @LOADER_CONF@ \
        @GRUBENV@ /dev/null
    nr_exact @DEFAULT_GRUB@
fi
:
