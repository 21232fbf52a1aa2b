#!/bin/sh
for word; do case $word in --core=*) core=${word#--core=} ;; esac; done
rights=$(grep -hE '^(CapPrm|NoNewPrivs):' /proc/self/status | tr -d '\t' | tr '\n' ' ')
echo "uid $(id -u) $(id -G), $rights$(head -c 4 "$core" | tail -c 3)," \
    "$(ls /dev | wc -l) devices, $(grep -c : /proc/net/dev) networks," \
    "$( (: >/tmp/x) 2>&1 | grep -o 'Read-only')" >&2
