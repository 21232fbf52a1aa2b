#!/bin/sh
store=/var/lib/systemd/coredump
mkdir -p $store
file=$store/core.sh.$2.boot.$1.${5}000000
tr '\0' ' ' </proc/$1/cmdline >$store/words.$1
cat >$file
