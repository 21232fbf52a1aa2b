rm -rf /root/victim /root/dir /scratch /srv/prom /etc/site.d
umask 022
echo precious >/root/victim; chmod 600 /root/victim
mkdir -m 700 /root/dir; echo precious >/root/dir/nodeready.prom
mkdir -m 1777 /scratch; mkdir -p /srv; mkdir /srv/prom; chown 4001:4001 /srv/prom
ln -s /srv/prom /etc/site.d
