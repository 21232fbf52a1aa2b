
mount -t tmpfs t /mnt && mkdir /mnt/root /mnt/root/mnt
for path in /*; do
    if [ -L "$path" ]; then cp -P "$path" "/mnt/root$path"
    elif [ -d "$path" ] && [ "$path" != /mnt ]; then
        mkdir "/mnt/root$path" && mount --rbind "$path" "/mnt/root$path"
    fi
done
$1
shift
here=$PWD
cd /mnt/root && exec chroot . sh -c 'cd "$0" && exec "$@"' "$here" "$@"
