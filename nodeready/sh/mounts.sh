# The mounts that are asked, and what they answer. A table that an earlier section of the same shell
# has read (mount_table.sh) is not read again.
# shellcheck disable=SC2086,SC2170 # one word per field; @MOST_MOUNTS@ is a number
if [ -z "${nr_table:-}" ]; then nr_table=$(NR_WANTED=@WANTED@ awk '@ROWS@' @TABLE@); fi

# A file system may be mounted in many places: a local one is asked once. A mount below a network
# mount is asked like a network mount, because its path leads through the network mount.
set -f
nr_local=' '
nr_net=' '
nr_seen=' '
IFS='
'
for nr_row in $nr_table; do
    unset IFS
    set -- ${nr_row#@TABLE@:*:}
    nr_dev=${1:-} nr_path=${2:-} nr_type=${3:-} nr_opts=${4:-}
    nr_kind=
    nr_wanted=
    case $nr_path in @PATTERN@) nr_wanted=1 ;; esac
    case $nr_type in
    autofs) continue ;;
    @NOT_OURS@) ;;
    @NETWORK@) nr_kind=net ;;
    @LOCAL@) nr_kind=local ;;
    tmpfs)
        case $nr_opts in
        ro|ro,*) ;;
        *) nr_kind=local nr_dev="$nr_dev:$nr_path" ;;
        esac
        ;;
    overlay) if [ "$nr_path" = / ]; then nr_kind=local; fi ;;
    esac
    case $nr_path in /proc/*|/sys/*|/run/user/*|/run/credentials/*|/run/containerd/*|/snap/*| \
    /run/netns/*|/var/lib/docker/*|/var/lib/containers/*|/var/lib/containerd/*|/var/lib/kubelet/*|/var/lib/lxcfs| \
    /run/containers/*|/run/crio/*|/run/docker/*|/run/k3s/*|/var/lib/rancher/*) nr_kind= ;; esac
    # A path with a newline could print any line.
    case $nr_path in *\\012*) continue ;; esac
    if [ -n "$nr_wanted" ]; then
        nr_kind=${nr_kind:-net}
    else
        case $nr_type in
        fuse*) ;;
        *) case $nr_seen in *" $nr_type:$nr_dev "*) nr_kind= ;; esac ;;
        esac
    fi
    if [ -z "$nr_kind" ]; then continue; fi
    nr_seen="$nr_seen$nr_type:$nr_dev "
    for nr_other in $nr_net; do
        case "$nr_path/" in "${nr_other%/}/"*) nr_kind=net ;; esac
    done
    case $nr_net in *" $nr_path "*) continue ;; esac
    case $nr_local in
    *" $nr_path "*)
        if [ $nr_kind = local ]; then continue; fi
        nr_local=${nr_local%%" $nr_path "*}' '${nr_local#*" $nr_path "}
        ;;
    esac
    if [ $nr_kind = net ]; then nr_net="$nr_net$nr_path "; else nr_local="$nr_local$nr_path "; fi
done
unset IFS
# The processes of the network mounts share a separate pipe. It is read until all processes have
# ended, or for @ANSWER_S@ s and the time to kill: so the section ends even when a process never does.
nr_path() {
    case $1 in
    *\\*) nr_file=$(printf '%b.' "$1") nr_file=${nr_file%.} ;;
    *) nr_file=$1 ;;
    esac
}
nr_nets() {
    nr_count=0
    for nr_mount in $nr_net; do
        nr_count=$((nr_count + 1))
        if [ $nr_count -gt @MOST_MOUNTS@ ]; then printf 'over=%s\n' "$nr_mount"; continue; fi
        printf 'asked=%s\n' "$nr_mount"
        nr_path "$nr_mount"
        case "
$nr_hung" in
        *"
$nr_file
"*) continue ;;
        esac
        timeout -k 1 @ANSWER_S@ stat -f -c '@MARK@%S %b %f %a %c %d %n' "$nr_file" 2>&1 &
    done
}
set --
printf 'mounts=begin\n'
for nr_mount in $nr_local; do
    printf 'asked=%s\n' "$nr_mount"
    nr_path "$nr_mount"
    set -- "$@" "$nr_file"
done
if [ $# -gt 0 ]; then stat -f -c '@MARK@%S %b %f %a %c %d %n' "$@" 2>&1; fi
printf 'mounts=local\n'
if [ "$nr_net" != ' ' ]; then nr_nets | timeout -k 1 @CAT_S@ cat; fi
printf 'mounts=end\n'
set +f
