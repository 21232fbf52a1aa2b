# Print the kernel's counts, then run the tool, unless an earlier run hangs. A tool is a Python script; the
# process is called python3 when env started the script.
# shellcheck disable=SC2013 # paths without white space
PATH=$PATH:/opt/rocm/bin
nr_have amd-smi rocm-smi
if [ ! -d /sys/module/amdgpu ]; then echo module=no; exit 0; fi
nr_value version /sys/module/amdgpu/version

if [ -d /sys/class/kfd/kfd ]; then
    grep -asHE '^([0-9]+|(location_id|domain) [0-9]+)$' /sys/class/kfd/kfd/topology/nodes/*/gpu_id \
        /sys/class/kfd/kfd/topology/nodes/*/properties /sys/class/kfd/kfd/proc/[0-9]*/vram_*
    grep -asHc ' : [PF]' /sys/bus/pci/drivers/amdgpu/*/ras/gpu_vram_bad_pages
    for nr_file in /sys/class/kfd/kfd/proc/[0-9]*; do
        nr_pid=${nr_file##*/} nr_comm=
        { read -r nr_comm <"/proc/$nr_pid/comm"; } 2>/dev/null || continue
        printf 'process=%s %s\n' "$nr_pid" "$nr_comm"
    done
fi

for nr_file in $(grep -alsE '\((amd-smi|rocm-smi|python[0-9.]*)\) D ' /proc/[0-9]*/stat); do
    # Any user can give a process such a name, and have it wait there.
    nr_is_roots "${nr_file%/stat}" || continue
    if grep -aqsE '/?(amd|rocm)[-_]smi' "${nr_file%stat}cmdline"; then
        nr_file=${nr_file%/stat}
        printf 'stuck=%s\n' "${nr_file##*/}"
        exit 0
    fi
done
nr_run() {
    printf '\n@%s run %s\n' "$NR" "$1"
    shift
    nr_answer "$@"
    printf '\n@%s ran %s\n' "$NR" "$nr_status"
    return "$nr_status"
}
if command -v amd-smi >/dev/null; then
    nr_run static amd-smi static --json && nr_run metric amd-smi metric --json &&
        nr_run xgmi amd-smi xgmi --json
else
    grep -asH '' /sys/bus/pci/drivers/amdgpu/*/ras/*_err_count \
        /sys/bus/pci/drivers/amdgpu/*/hwmon/hwmon*/temp[1-3]_crit /sys/bus/pci/drivers/amdgpu/*/hwmon/hwmon*/temp[1-3]_label
    nr_run rocm rocm-smi -a --json
fi
exit 0
